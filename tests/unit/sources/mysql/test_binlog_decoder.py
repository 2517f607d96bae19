"""Constructed bytes of events that no server here writes: events of unknown types, and statements in all forms."""

from __future__ import annotations

import struct
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import FLAG_IGNORABLE, FLAG_THREAD_SPECIFIC, EventType, Other, Query, Unknown
from headwater.sources.mysql.changes import MySqlChangeStream
from headwater.sources.mysql.offset import MySqlOffset

BLOCK = struct.pack("<I", 7) + b"1\tx\n"


def packet(kind: int, body: bytes, flags: int = 0) -> bytes:
    size = 19 + len(body) + 4
    data = struct.pack("<IBIIIH", 1_700_000_000, kind, 1, size, 4 + size, flags) + body
    return data + struct.pack("<I", zlib.crc32(data))


def query(kind: int, sql: bytes, status: bytes = b"", more: bytes = b"", flags: int = 0) -> Query:
    head = struct.pack("<IIBHH", 3, 0, 4, 0, len(status))
    event = EventDecoder().feed(packet(kind, head + more + status + b"shop\0" + sql, flags))
    assert isinstance(event, Query)
    return event


@pytest.mark.parametrize("kind", [6, 8, 10, 12, 20, 21, 22, 43, 99, 159, 172, 255])
def test_an_event_of_an_unknown_type_is_skipped_only_if_it_is_ignorable(kind: int) -> None:
    """Old kinds of LOAD DATA and of rows are among them: no server that can be captured writes them."""
    assert isinstance(EventDecoder().feed(packet(kind, b"?")), Unknown)
    assert isinstance(EventDecoder().feed(packet(kind, b"?", FLAG_IGNORABLE)), Other)
    inner = packet(kind, b"?")[:-4]
    inner = inner[:9] + struct.pack("<I", len(inner)) + inner[13:]
    assert isinstance(EventDecoder().feed_inner(inner), Unknown)


@pytest.mark.parametrize(
    "kind",
    [
        EventType.STOP,
        EventType.INTVAR,
        EventType.RAND,
        EventType.USER_VAR,
        EventType.BEGIN_LOAD_QUERY,
        EventType.APPEND_BLOCK,
        EventType.DELETE_FILE,
        EventType.MARIADB_BINLOG_CHECKPOINT,
    ],
)
def test_events_that_change_nothing_by_themselves_are_skipped(kind: int) -> None:
    assert isinstance(EventDecoder().feed(packet(kind, BLOCK)), Other)


def test_load_data_is_a_statement() -> None:
    event = query(
        EventType.EXECUTE_LOAD_QUERY,
        b"LOAD DATA INFILE 'x' INTO TABLE t",
        b"\x0c\x02shop\0other\0",
        struct.pack("<IIIB", 7, 9, 20, 1),
    )
    assert (event.database, event.sql) == ("shop", "LOAD DATA INFILE 'x' INTO TABLE t")
    assert event.databases == ("shop", "other")


@pytest.mark.parametrize("status", [b"", b"\x0c\xfe", b"\x0c\x00", b"\x0c\x02shop\0"])
def test_databases_are_unknown_where_the_server_does_not_name_them(status: bytes) -> None:
    assert query(EventType.QUERY, b"DELETE FROM t", status).databases is None


def test_a_statement_says_whether_it_may_use_temporary_tables() -> None:
    assert not query(EventType.QUERY, b"DELETE FROM t").uses_temporary
    assert query(EventType.QUERY, b"DELETE FROM t", flags=FLAG_THREAD_SPECIFIC).uses_temporary


class LogDouble:
    """A log of constructed packets: no server here writes such events."""

    def __init__(self, *packets: bytes) -> None:
        self.server: Any = SimpleNamespace(settings={}, server="s")
        self._packets = list(packets)

    def read(self, max_packets: int, max_bytes: int, timeout: float) -> list[bytes]:
        packets, self._packets = self._packets, []
        return packets


def test_an_unknown_event_in_the_log_of_a_double_ends_the_capture() -> None:
    log: Any = LogDouble(packet(99, b"?", FLAG_IGNORABLE), packet(99, b"?"))
    stream = MySqlChangeStream(log, definitions=None, tables=(), start=MySqlOffset("binlog.000001", 4))  # type: ignore[arg-type]
    with pytest.raises(SourceMisconfigured, match="event of type 99") as caught:
        stream.poll(0.0, stop_at_boundary=True)
    assert "run: headwater resnapshot" in str(caught.value.next_step)
