"""Row decoders: one suite for the Python one and the compiled one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.sources.postgres import pgoutput_bytes as wire
from tests.unit.sources.postgres.pgoutput_bytes import UNCHANGED

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.decoder import (
    CompiledDecoder,
    PythonDecoder,
    RawRows,
    RowDecoder,
    is_compiled,
    make_decoder,
)
from headwater.sources.postgres.pgoutput import POSTGRES_EPOCH_US
from headwater.stream import Op

OID = 16384
I, D, UI, UD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE  # noqa: E741

MakeDecoder = Callable[[], RowDecoder]


@pytest.fixture(params=["python", "compiled"])
def make(request: pytest.FixtureRequest) -> MakeDecoder:
    if request.param == "python":
        return PythonDecoder
    if not is_compiled():
        pytest.skip("the compiled decoder was not built")
    return CompiledDecoder


@pytest.fixture
def decoder(make: MakeDecoder) -> RowDecoder:
    """A decoder that knows a table of three columns; the first two are its key."""
    made = make()
    made.add_relation(OID, 3, [0, 1])
    return made


def feed(decoder: RowDecoder, messages: list[bytes], **limits: Any) -> int:
    options = {"max_rows": 1000, "max_bytes": 1 << 20, "stop_at_commit": False} | limits
    return decoder.feed(messages, 0, **options)


def rows_of(rows: RawRows) -> list[tuple[Op, int, list[Any]]]:
    """Op, number and values of each row; what is unchanged is marked."""
    columns = [column.text.to_pylist() for column in rows.columns]
    for values, column in zip(columns, rows.columns, strict=True):
        column.text.validate(full=True)
        if column.unchanged is not None:
            assert column.unchanged.dtype == np.bool_
            for place in np.flatnonzero(column.unchanged):
                assert values[place] is None
                values[place] = UNCHANGED
    return [
        (Op(int(op)), int(seq), [values[row] for values in columns])
        for row, (op, seq) in enumerate(zip(rows.ops, rows.seq, strict=True))
    ]


def transaction(*messages: bytes, lsn: int = 300) -> list[bytes]:
    return [wire.begin(lsn), *messages, wire.commit(lsn)]


def decoded(decoder: RowDecoder, *messages: bytes) -> list[tuple[Op, int, list[Any]]]:
    feed(decoder, transaction(*messages))
    (rows,) = decoder.take()
    return rows_of(rows)


def test_an_insert_is_a_row(decoder: RowDecoder) -> None:
    assert decoded(decoder, wire.insert(OID, ["1", None, "größe"])) == [(I, 0, ["1", None, "größe"])]


def test_empty_text_is_not_null(decoder: RowDecoder) -> None:
    assert decoded(decoder, wire.insert(OID, ["", None, ""])) == [(I, 0, ["", None, ""])]


def test_a_column_may_begin_with_a_null_or_nothing_also_after_rows_were_taken(decoder: RowDecoder) -> None:
    for values in (["1", "2", "3"], [None, "", None], ["1", None, ""]):
        assert decoded(decoder, wire.insert(OID, values)) == [(I, 0, values)]


def test_a_delete_tells_the_whole_row_or_the_key(decoder: RowDecoder) -> None:
    messages = (wire.delete(OID, old=["1", "2", "3"]), wire.delete(OID, key=["1", "2", None]))
    assert decoded(decoder, *messages) == [(D, 0, ["1", "2", "3"]), (D, 1, ["1", "2", None])]


def test_a_key_never_brings_values_beside_the_key(decoder: RowDecoder) -> None:
    messages = (wire.delete(OID, key=["1", "2", "3"]), wire.delete(OID, key=["1", "2", UNCHANGED]))
    assert decoded(decoder, *messages) == [(D, 0, ["1", "2", None]), (D, 1, ["1", "2", None])]


def test_an_update_without_an_old_row_stands_alone(decoder: RowDecoder) -> None:
    assert decoded(decoder, wire.update(OID, ["1", "2", "x"])) == [(UI, 0, ["1", "2", "x"])]


def test_an_update_with_the_old_row_is_a_pair(decoder: RowDecoder) -> None:
    message = wire.update(OID, ["1", "2", "new"], old=["1", "2", "old"])
    assert decoded(decoder, message) == [(UD, 0, ["1", "2", "old"]), (UI, 1, ["1", "2", "new"])]


def test_an_unchanged_value_is_taken_from_the_old_row(decoder: RowDecoder) -> None:
    message = wire.update(OID, ["1", UNCHANGED, UNCHANGED], old=["1", "2", "big" * 1000])
    assert decoded(decoder, message) == [(UD, 0, ["1", "2", "big" * 1000]), (UI, 1, ["1", "2", "big" * 1000])]


def test_an_unchanged_value_without_an_old_row_is_marked(decoder: RowDecoder) -> None:
    messages = (wire.update(OID, ["1", "2", UNCHANGED]), wire.update(OID, ["1", "2", None]))
    feed(decoder, transaction(*messages))
    (rows,) = decoder.take()
    assert rows_of(rows) == [(UI, 0, ["1", "2", UNCHANGED]), (UI, 1, ["1", "2", None])]
    assert rows.columns[0].unchanged is None


def test_the_mark_is_gone_in_the_next_rows(decoder: RowDecoder) -> None:
    decoded(decoder, wire.update(OID, ["1", "2", UNCHANGED]))
    feed(decoder, transaction(wire.update(OID, ["1", "2", "3"])))
    (rows,) = decoder.take()
    assert rows.columns[2].unchanged is None


def test_an_update_of_the_key_is_a_delete_and_an_insert(decoder: RowDecoder) -> None:
    message = wire.update(OID, ["1", "3", UNCHANGED], key=["1", "2", None])
    assert decoded(decoder, message) == [(D, 0, ["1", "2", None]), (I, 1, ["1", "3", UNCHANGED])]


def test_a_key_that_was_told_but_did_not_change_is_an_update(decoder: RowDecoder) -> None:
    """The server tells the old key also where the key is stored out of line, and then leaves it out of the new row."""
    messages = (wire.update(OID, [UNCHANGED, "2", UNCHANGED], key=["1", "2", None]), wire.insert(OID, ["5", "6", "7"]))
    assert decoded(decoder, *messages) == [(UI, 1, ["1", "2", UNCHANGED]), (I, 2, ["5", "6", "7"])]


def test_rows_carry_commit_and_number(decoder: RowDecoder) -> None:
    decoder.add_relation(7, 1, [0])
    one = [wire.begin(300, 5, 9), wire.insert(OID, ["1", "2", "3"]), wire.insert(7, ["x"])]
    one += [wire.insert(OID, ["4", "5", "6"]), wire.commit(300, 310, 6)]
    two = [wire.begin(2**63 + 5, -1, 2**32 - 1), wire.insert(OID, ["7", "8", "9"]), wire.commit(2**63 + 5, 2**63 + 9)]
    assert feed(decoder, one + two) == 8
    small, large = decoder.take()
    assert (small.oid, large.oid) == (7, OID)
    assert large.commit_lsn.tolist() == [300, 300, 2**63 + 5]
    assert large.seq.tolist() == [0, 2, 0]
    assert large.xid.tolist() == [9, 9, 2**32 - 1]
    assert large.commit_time.tolist() == [POSTGRES_EPOCH_US + 5, POSTGRES_EPOCH_US + 5, POSTGRES_EPOCH_US - 1]
    assert [array.dtype for array in (large.ops, large.commit_lsn, large.seq, large.xid, large.commit_time)] == [
        np.dtype(name) for name in ("int8", "uint64", "uint32", "uint32", "int64")
    ]
    assert small.seq.tolist() == [1]
    assert decoder.last_commit == (2**63 + 5, 2**63 + 9, POSTGRES_EPOCH_US)


def test_it_knows_where_it_is(decoder: RowDecoder) -> None:
    assert (decoder.last_commit, decoder.transaction, decoder.in_transaction) == (None, None, False)
    feed(decoder, [wire.begin(300, 5, 9), wire.insert(OID, ["1", "2", "3"])])
    assert (decoder.transaction, decoder.in_transaction) == ((300, POSTGRES_EPOCH_US + 5, 9), True)
    assert decoder.next_seq == 1
    feed(decoder, [wire.commit(300, 308, 5)])
    assert (decoder.last_commit, decoder.transaction) == ((300, 308, POSTGRES_EPOCH_US + 5), None)


@pytest.mark.parametrize(
    "control",
    [
        wire.relation(OID, "public", "t", ()),
        wire.type_(1, "public", "t"),
        wire.truncate([1]),
        wire.message(1, "p", b""),
        wire.origin(1, "o"),
        wire.stream_start(1),
        wire.stream_stop(),
        wire.stream_commit(1, 2, 3),
        wire.stream_abort(1, 2),
    ],
)
def test_it_stops_at_messages_that_are_not_rows(decoder: RowDecoder, control: bytes) -> None:
    messages = [wire.begin(300), wire.insert(OID, ["1", "2", "3"]), control, wire.commit(300)]
    assert feed(decoder, messages) == 2
    assert decoder.feed(messages, 3, max_rows=9, max_bytes=9, stop_at_commit=False) == 4
    assert decoder.last_commit is not None


def test_it_stops_after_a_commit_if_asked(decoder: RowDecoder) -> None:
    messages = transaction(wire.insert(OID, ["1", "2", "3"])) + transaction(wire.insert(OID, ["4", "5", "6"]), lsn=400)
    assert feed(decoder, messages, stop_at_commit=True) == 3
    assert decoder.held_rows == 1
    assert decoder.feed(messages, 3, max_rows=9, max_bytes=1 << 20, stop_at_commit=True) == 6
    assert decoder.held_rows == 2


def test_it_stops_before_a_row_when_enough_rows_are_held(decoder: RowDecoder) -> None:
    pair = wire.update(OID, ["1", "2", "b"], old=["1", "2", "a"])
    messages = transaction(pair, pair, pair)
    assert feed(decoder, messages, max_rows=3) == 3
    assert decoder.held_rows == 4
    assert feed(decoder, messages[3:], max_rows=3) == 0
    decoder.take()
    assert decoder.held_rows == 0
    assert feed(decoder, messages[3:], max_rows=3) == 2
    assert decoder.take()[0].seq.tolist() == [4, 5]


def test_it_takes_the_commit_although_enough_is_held(decoder: RowDecoder) -> None:
    assert feed(decoder, transaction(wire.insert(OID, ["1", "2", "3"])), max_rows=1) == 3


def test_it_stops_before_a_row_when_enough_bytes_are_held(decoder: RowDecoder) -> None:
    row = wire.insert(OID, ["1", "2", "x" * 100])
    messages = transaction(row, row, row)
    assert feed(decoder, messages, max_bytes=len(row) + 1) == 3
    assert decoder.held_bytes == 2 * len(row)
    decoder.take()
    assert decoder.held_bytes == 0


def test_limits_below_one_are_refused(decoder: RowDecoder) -> None:
    for bad in ({"max_rows": 0}, {"max_bytes": 0}):
        with pytest.raises(ValueError, match="at least"):
            feed(decoder, [], **bad)
    with pytest.raises(ValueError, match="at least"):
        decoder.feed([], -1, max_rows=1, max_bytes=1, stop_at_commit=False)


def test_rows_of_an_ignored_table_take_numbers_only(decoder: RowDecoder) -> None:
    decoder.ignore_relation(7)
    messages = (
        wire.insert(7, ["a"]),
        wire.update(7, ["a"], old=["b"]),
        wire.update(7, ["a"]),
        wire.delete(7, key=["a"]),
        wire.insert(OID, ["1", "2", "3"]),
    )
    assert decoded(decoder, *messages) == [(I, 5, ["1", "2", "3"])]


def test_a_streamed_transaction_is_replayed_with_its_commit(decoder: RowDecoder) -> None:
    decoder.begin_streamed(500, 1234, 77)
    assert decoder.transaction == (500, 1234, 77)
    messages = [
        wire.insert(OID, ["1", "2", "3"], xid=77),
        wire.update(OID, ["1", "2", UNCHANGED], old=["1", "2", "3"], xid=78),
        wire.delete(OID, key=["1", "2", None], xid=77),
    ]
    assert feed(decoder, messages) == 3
    decoder.end_streamed()
    assert not decoder.in_transaction
    (rows,) = decoder.take()
    assert [op for op, _, _ in rows_of(rows)] == [I, UD, UI, D]
    assert set(rows.xid.tolist()) == {77}
    assert set(rows.commit_lsn.tolist()) == {500}
    assert set(rows.commit_time.tolist()) == {1234}
    assert rows.seq.tolist() == [0, 1, 2, 3]
    assert decoder.last_commit is None


def test_a_streamed_transaction_and_another_do_not_mix(decoder: RowDecoder) -> None:
    with pytest.raises(SourceProtocolError):
        decoder.end_streamed()
    feed(decoder, [wire.begin(300)])
    with pytest.raises(SourceProtocolError):
        decoder.begin_streamed(500, 0, 1)
    feed(decoder, [wire.commit(300)])
    decoder.begin_streamed(500, 0, 1)
    for message in (wire.begin(600), wire.commit(500)):
        with pytest.raises(SourceProtocolError):
            feed(decoder, [message])


def test_other_things_can_take_a_number(decoder: RowDecoder) -> None:
    feed(decoder, [wire.begin(300), wire.insert(OID, ["1", "2", "3"])])
    decoder.next_seq += 1
    feed(decoder, [wire.insert(OID, ["1", "2", "3"])])
    assert decoder.take()[0].seq.tolist() == [0, 2]
    with pytest.raises((ValueError, OverflowError)):
        decoder.next_seq = 2**32


def test_a_transaction_has_only_so_many_numbers(decoder: RowDecoder) -> None:
    feed(decoder, [wire.begin(300)])
    decoder.next_seq = 2**32 - 3
    feed(decoder, [wire.insert(OID, ["1", "2", "3"])])
    with pytest.raises(SourceProtocolError):
        feed(decoder, [wire.insert(OID, ["1", "2", "3"])])
    assert decoder.take()[0].seq.tolist() == [2**32 - 3]


def test_a_table_can_change_its_columns_once_its_rows_are_taken(decoder: RowDecoder) -> None:
    feed(decoder, [wire.begin(300), wire.insert(OID, ["1", "2", "3"])])
    with pytest.raises(ValueError, match="held"):
        decoder.add_relation(OID, 2, [0])
    with pytest.raises(ValueError, match="held"):
        decoder.ignore_relation(OID)
    decoder.take()
    decoder.add_relation(OID, 2, [1])
    feed(decoder, [wire.insert(OID, ["1", "2"]), wire.delete(OID, key=["1", "2"])])
    assert rows_of(decoder.take()[0]) == [(I, 1, ["1", "2"]), (D, 2, [None, "2"])]


def test_a_table_without_columns_has_rows(make: MakeDecoder) -> None:
    decoder = make()
    decoder.add_relation(OID, 0, [])
    assert decoded(decoder, wire.insert(OID, []), wire.insert(OID, [])) == [(I, 0, []), (I, 1, [])]


@pytest.mark.parametrize(
    ("oid", "columns", "keys"), [(2**32, 1, [0]), (1, 65536, [0]), (1, 1, [1]), (1, 1, [-1]), (1, -1, [])]
)
def test_what_cannot_be_a_relation_is_refused(make: MakeDecoder, oid: int, columns: int, keys: list[int]) -> None:
    with pytest.raises(ValueError, match=r"oid|key column"):
        make().add_relation(oid, columns, keys)


def test_many_rows_of_many_tables(make: MakeDecoder) -> None:
    """Enough for every buffer to grow a few times."""
    decoder = make()
    tables = range(100, 130)
    for oid in reversed(tables):
        decoder.add_relation(oid, 2, [0])
    messages = [wire.begin(300)]
    for number in range(6000):
        values = [str(number), None if number % 7 == 0 else "v" * (number % 50)]
        messages.append(wire.insert(tables[number % 30], values))
    messages.append(wire.commit(300))
    assert feed(decoder, messages, max_rows=10_000, max_bytes=1 << 30) == len(messages)
    taken = decoder.take()
    assert [rows.oid for rows in taken] == list(tables)
    for rows in taken:
        assert len(rows) == 200
        for op, seq, values in rows_of(rows):
            assert op is I
            assert values == [str(seq), None if seq % 7 == 0 else "v" * (seq % 50)]


def test_text_that_is_no_utf8_is_refused(decoder: RowDecoder) -> None:
    feed(decoder, transaction(wire.insert(OID, ["1", b"caf\xe9", "3"])))
    with pytest.raises(SourceProtocolError, match="UTF-8") as caught:
        decoder.take()
    assert "caf" not in str(caught.value)
    assert decoder.held_rows == 0


def test_a_character_cut_in_two_values_is_refused(decoder: RowDecoder) -> None:
    feed(decoder, transaction(wire.insert(OID, ["1", b"\xc3", "3"]), wire.insert(OID, ["1", b"\xa9", "3"])))
    with pytest.raises(SourceProtocolError, match="UTF-8"):
        decoder.take()


ROWS = [
    wire.insert(OID, ["1", None, "xyz"]),
    wire.insert(OID, [None, None, None]),
    wire.delete(OID, key=["1", "2", None]),
    wire.delete(OID, old=["1", "2", "3"]),
    wire.update(OID, ["1", UNCHANGED, "n"]),
    wire.update(OID, ["1", "2", UNCHANGED], old=["1", "2", "o"]),
    wire.update(OID, ["1", "9", UNCHANGED], key=["1", "2", None]),
    wire.update(OID, [UNCHANGED, "2", None], key=["1", "2", None]),
]


@pytest.mark.parametrize("message", ROWS)
def test_a_row_that_is_cut_off_or_too_long_is_refused_and_leaves_nothing(decoder: RowDecoder, message: bytes) -> None:
    good = wire.insert(OID, ["a", "b", "c"])
    feed(decoder, [wire.begin(300), good])
    for bad in [message[:end] for end in range(len(message))] + [message + b"\0", message + b"n"]:
        with pytest.raises(SourceProtocolError):
            feed(decoder, [bad])
    feed(decoder, [message])
    rows = rows_of(decoder.take()[0])
    assert rows[0] == (I, 0, ["a", "b", "c"])
    assert rows[1:] == decoded_alone(type(decoder), message, first_seq=1)


def decoded_alone(make: Callable[[], Any], message: bytes, first_seq: int) -> list[tuple[Op, int, list[Any]]]:
    decoder = make()
    decoder.add_relation(OID, 3, [0, 1])
    feed(decoder, [wire.begin(300)])
    decoder.next_seq = first_seq
    feed(decoder, [message])
    return rows_of(decoder.take()[0])


@pytest.mark.parametrize("message", [wire.begin(300), wire.commit(300)])
def test_a_begin_or_commit_that_is_cut_off_or_too_long_is_refused(make: MakeDecoder, message: bytes) -> None:
    for end in [*range(len(message)), len(message) + 1]:
        decoder = make()
        if message[25:26] == b"C":
            feed(decoder, [wire.begin(300)])
        with pytest.raises(SourceProtocolError):
            feed(decoder, [(message + b"\0")[:end]])
        assert decoder.last_commit is None


BAD = {
    "row before begin": [wire.insert(OID, ["1", "2", "3"])],
    "begin in begin": [wire.begin(300), wire.begin(301)],
    "commit before begin": [wire.commit(300)],
    "commit of another": [wire.begin(300), wire.commit(301)],
    "unknown table": [wire.begin(300), wire.insert(1, ["1"])],
    "too few columns": [wire.begin(300), wire.insert(OID, ["1", "2"])],
    "too many columns": [wire.begin(300), wire.insert(OID, ["1", "2", "3", "4"])],
    "unknown type": [wire.begin(300), wire.raw(b"x")],
    "prepared transaction": [wire.raw(b"b" + bytes(32))],
    "binary value": [wire.begin(300), wire.raw(b"I\0\0\x40\0N\0\3nnb\0\0\0\0")],
    "insert of an old row": [wire.begin(300), wire.raw(b"I\0\0\x40\0O\0\3nnn")],
    "delete of a new row": [wire.begin(300), wire.raw(b"D\0\0\x40\0N\0\3nnn")],
    "update without a new row": [wire.begin(300), wire.raw(b"U\0\0\x40\0O\0\3nnn")],
    "update with two old rows": [wire.begin(300), wire.raw(b"U\0\0\x40\0O\0\3nnnO\0\3nnn")],
    "update of unknown part": [wire.begin(300), wire.raw(b"U\0\0\x40\0X\0\3nnn")],
    "length beyond the message": [wire.begin(300), wire.raw(b"I\0\0\x40\0N\0\3nnt\xff\xff\xff\xff")],
    "length of 2 GiB": [wire.begin(300), wire.raw(b"I\0\0\x40\0N\0\3nnt\x7f\xff\xff\xffabc")],
    "keepalive": [b"k" + bytes(40)],
    "nothing": [b""],
}


@pytest.mark.parametrize("messages", BAD.values(), ids=BAD.keys())
def test_what_the_protocol_does_not_have_is_refused(decoder: RowDecoder, messages: list[bytes]) -> None:
    with pytest.raises(SourceProtocolError) as caught:
        feed(decoder, messages)
    assert caught.value.next_step
    assert decoder.held_rows == 0
    assert decoder.take() == []


def test_only_bytes_are_messages() -> None:
    if not is_compiled():
        pytest.skip("the compiled decoder was not built")
    decoder = CompiledDecoder()
    with pytest.raises(TypeError):
        decoder.feed(["w"], 0, max_rows=1, max_bytes=1, stop_at_commit=False)
    with pytest.raises(TypeError):
        decoder.feed((), 0, max_rows=1, max_bytes=1, stop_at_commit=False)


def test_python_is_used_when_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_PURE", "1")
    assert not is_compiled()
    assert type(make_decoder()) is PythonDecoder


def test_everything_is_there_without_the_compiled_module() -> None:
    program = (
        "import sys; sys.modules['headwater.sources.postgres._decoder'] = None\n"
        "from headwater.sources.postgres import convert, csv, decoder\n"
        "assert not decoder.is_compiled()\n"
        "assert type(decoder.make_decoder()) is decoder.PythonDecoder\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
