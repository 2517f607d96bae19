"""Control messages: each kind, plain and streamed, and everything that is not one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sources.postgres import pgoutput_bytes as wire

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres import pgoutput
from headwater.sources.postgres.offset import Lsn

EPOCH = pgoutput.POSTGRES_EPOCH_US
COLUMNS = (("id", True, 20, -1), ("größe", False, 1700, 1179652))
RELATION = pgoutput.Relation(
    16384,
    "public",
    "orders",
    "d",
    (pgoutput.RelationColumn("id", True, 20, -1), pgoutput.RelationColumn("größe", False, 1700, 1179652)),
)

PLAIN = [
    (wire.begin(300, 5, 9), pgoutput.Begin(Lsn(300), EPOCH + 5, 9)),
    (wire.commit(300, 308, -5), pgoutput.Commit(Lsn(300), Lsn(308), EPOCH - 5)),
    (wire.origin(77, "other"), pgoutput.Origin(Lsn(77), "other")),
    (wire.relation(16384, "public", "orders", COLUMNS), RELATION),
    (wire.relation(1, "", "pg_class", (), "n"), pgoutput.Relation(1, "pg_catalog", "pg_class", "n", ())),
    (wire.type_(16390, "public", "mood"), pgoutput.Type(16390, "public", "mood")),
    (wire.truncate([1, 2], 3), pgoutput.Truncate((1, 2), cascade=True, restart_identity=True)),
    (wire.truncate([1], 1), pgoutput.Truncate((1,), cascade=True, restart_identity=False)),
    (wire.message(9, "wm", b"a\0b"), pgoutput.Message(True, Lsn(9), "wm", b"a\0b")),
    (wire.message(9, "", b"", transactional=False), pgoutput.Message(False, Lsn(9), "", b"")),
    (wire.stream_start(5), pgoutput.StreamStart(5, is_first=True)),
    (wire.stream_start(5, first=False), pgoutput.StreamStart(5, is_first=False)),
    (wire.stream_stop(), pgoutput.StreamStop()),
    (wire.stream_commit(5, 300, 308, 1), pgoutput.StreamCommit(5, Lsn(300), Lsn(308), EPOCH + 1)),
    (wire.stream_abort(5, 6), pgoutput.StreamAbort(5, 6)),
    (wire.stream_abort(5, 6) + bytes(16), pgoutput.StreamAbort(5, 6)),
]
STREAMED = [
    (wire.relation(1, "s", "t", (), "f", xid=8), pgoutput.Relation(1, "s", "t", "f", (), 8)),
    (wire.type_(2, "s", "t", xid=8), pgoutput.Type(2, "s", "t", 8)),
    (wire.truncate([3], xid=8), pgoutput.Truncate((3,), cascade=False, restart_identity=False, xid=8)),
    (wire.message(9, "p", b"x", xid=8), pgoutput.Message(True, Lsn(9), "p", b"x", 8)),
    (wire.origin(77, "other"), pgoutput.Origin(Lsn(77), "other")),
]


@pytest.mark.parametrize(("message", "value"), PLAIN)
def test_a_message_is_read(message: bytes, value: object) -> None:
    assert pgoutput.parse_control(message) == value


@pytest.mark.parametrize(("message", "value"), STREAMED)
def test_a_message_inside_a_streamed_transaction_carries_its_xid(message: bytes, value: object) -> None:
    assert pgoutput.parse_control(message, streamed=True) == value


@pytest.mark.parametrize(
    ("message", "streamed"),
    [*((message, False) for message, _ in PLAIN), *((message, True) for message, _ in STREAMED)],
)
def test_a_message_that_is_cut_off_or_too_long_is_refused(message: bytes, streamed: bool) -> None:
    for end in range(len(message)):
        if message[:end] != wire.stream_abort(5, 6):
            with pytest.raises(SourceProtocolError):
                pgoutput.parse_control(message[:end], streamed=streamed)
    with pytest.raises(SourceProtocolError):
        pgoutput.parse_control(message + b"\0", streamed=streamed)


@given(st.sampled_from(b"BCORYTMSEcAIUDxyz\0\xff"), st.binary(max_size=60), st.booleans())
def test_random_bytes_are_a_message_or_an_error(kind: int, body: bytes, streamed: bool) -> None:
    try:
        made = pgoutput.parse_control(wire.raw(bytes([kind]) + body), streamed=streamed)
    except SourceProtocolError:
        return
    assert type(made).__module__ == pgoutput.__name__


@pytest.mark.parametrize("message", [b"", b"w", b"k" + bytes(40), b"w" + bytes(24)])
def test_what_is_no_wal_data_is_refused(message: bytes) -> None:
    for read in (pgoutput.type_of, pgoutput.parse_control):
        with pytest.raises(SourceProtocolError):
            read(message)


def test_the_header_is_read_and_written() -> None:
    message = pgoutput.raw_message(b"E", wal_start=0x16_B374_D848, wal_end=5, send_time=-1)
    assert message == b"w" + bytes.fromhex("00000016b374d848 0000000000000005 ffffffffffffffff") + b"E"
    assert pgoutput.type_of(message) == pgoutput.STREAM_STOP
