"""The decoder on recorded binlogs of real servers (``tests/db/mysql/record_binlogs.py`` makes them)."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.db.mysql.binlog_reading import DECODERS, columns_of, decode, events_of, packets_of, plan_of, rows_events_of

from headwater.sources.errors import SourceMisconfigured, SourceProtocolError
from headwater.sources.mysql.binlog._row_decoder import Decoder
from headwater.sources.mysql.binlog.cursor import Cursor
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import (
    Event,
    EventHeader,
    EventType,
    FormatDescription,
    Gtid,
    Heartbeat,
    Query,
    Rotate,
    RowsEvent,
    Xid,
)
from headwater.sources.mysql.binlog.gtid_events import parse_tagged_gtid
from headwater.sources.mysql.binlog.json_diff import apply_diffs, parse_document, parse_path, print_document
from headwater.sources.mysql.binlog.json_text import json_text
from headwater.sources.mysql.binlog.python_rows import PythonRows
from headwater.sources.mysql.binlog.row_layout import ColumnPlan, TablePlan
from headwater.sources.mysql.binlog.rows import RowsDecoder, is_compiled, make_rows_decoder
from headwater.sources.mysql.binlog.table_map import BinlogColumn, ColumnType
from headwater.sources.table import SpecialValues

RECORDED = Path(__file__).parents[3] / "fixtures" / "binlog"
FILES = sorted(path.stem for path in RECORDED.glob("*.bin"))
HEADER = EventHeader(0, 0, 1, 0, 0, 0)


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("name", FILES)
def test_recorded_rows_are_what_the_server_showed(name: str, make: type[Decoder | PythonRows]) -> None:
    events = rows_events_of(RECORDED / f"{name}.bin", "t")
    inserted = [event for event in events if event.kind == 1]
    plan = plan_of(inserted[0].table, special=SpecialValues.TEXT)
    shown = json.loads((RECORDED / f"{name}.json").read_text())
    assert columns_of(decode(make, inserted, plan), inserted[0].table) == shown


@pytest.mark.parametrize("name", FILES)
def test_both_decoders_give_the_same_buffers(name: str) -> None:
    events = rows_events_of(RECORDED / f"{name}.bin", "t")
    plan = plan_of(events[0].table, special=SpecialValues.NULL)
    compiled, python = (RowsDecoder(plan, make) for make in DECODERS)
    seq = 0
    for event in events:
        after = compiled.add(event, 9, seq)
        assert python.add(event, 9, seq) == after
        seq = after
    assert compiled.held_rows == python.held_rows == seq
    assert compiled.held_bytes == python.held_bytes > 0
    ours, theirs = compiled.take(), python.take()
    assert ours.ops.tolist() == theirs.ops.tolist()
    assert ours.seq.tolist() == theirs.seq.tolist() == list(range(seq))
    assert set(ours.transaction.tolist()) == {9}
    for one, other in zip(ours.columns, theirs.columns, strict=True):
        assert one is not None
        assert other is not None
        assert one.values.equals(other.values)
        assert (one.missing is None) == (other.missing is None)
        if one.missing is not None and other.missing is not None:
            assert one.missing.tolist() == other.missing.tolist()
    assert compiled.held_rows == 0


@pytest.mark.parametrize("make", DECODERS)
def test_an_event_that_is_malformed_leaves_the_rows_before_it(make: type[Decoder | PythonRows]) -> None:
    first, second = rows_events_of(RECORDED / "mysql-9.7.bin", "t")[:2]
    decoder = RowsDecoder(plan_of(first.table, special=SpecialValues.TEXT), make)
    assert decoder.add(first, 1, 0) == 1
    whole = decode(make, [first], plan_of(first.table, special=SpecialValues.TEXT))
    for end in range(second.start + 1, second.end):
        cut = RowsEvent(
            *(second.header, second.table, second.kind, second.present, second.present_after),
            *(second.is_statement_end, second.data, second.start, end),
        )
        with pytest.raises(SourceProtocolError):
            decoder.add(cut, 1, 1)
    assert decoder.held_rows == 1
    rows = decoder.take()
    assert columns_of(rows, first.table) == columns_of(whole, first.table)


@pytest.mark.parametrize("make", DECODERS)
def test_columns_that_are_not_captured_are_passed_over(make: type[Decoder | PythonRows]) -> None:
    events = [event for event in rows_events_of(RECORDED / "mariadb-10.11.bin", "t") if event.kind == 1]
    whole = plan_of(events[0].table, special=SpecialValues.TEXT)
    kept = ("id", "e", "ge")
    plan = TablePlan(
        whole.full_name,
        tuple(
            column if column.name in kept else ColumnPlan(column.column, None, "", name=column.name)
            for column in whole.columns
        ),
    )
    rows, all_rows = decode(make, events, plan), decode(make, events, whole)
    for column, decoded, wanted in zip(plan.columns, rows.columns, all_rows.columns, strict=True):
        assert (decoded is None) == (column.name not in kept)
        if decoded is not None and wanted is not None:
            assert decoded.values.equals(wanted.values)


@pytest.mark.parametrize("name", FILES)
def test_a_stream_cut_off_anywhere_is_refused_or_whole(name: str) -> None:
    packets = list(packets_of(RECORDED / f"{name}.bin"))
    for place, packet in enumerate(packets):
        for end in range(len(packet)):
            decoder = EventDecoder()
            for before in packets[:1]:
                decoder.feed(before)
            with pytest.raises(SourceProtocolError):
                decoder.feed(packet[:end])
            if place and end > 40:
                break


def test_the_same_table_map_comes_as_the_same_object() -> None:
    events = rows_events_of(RECORDED / "mariadb-10.11.bin", "t")
    assert len({id(event.table) for event in events}) == 1


def test_rows_of_all_tables_of_a_statement_are_read_however_many_tables_came_before() -> None:
    decoder = EventDecoder()

    def feed(kind: int, body: bytes) -> Event:
        return decoder.feed_inner(struct.pack("<IBIIIH", 0, kind, 1, 19 + len(body), 0, 0) + body)

    def describe(number: int) -> None:
        feed(EventType.TABLE_MAP, number.to_bytes(6, "little") + b"\0\0\1a\0\1b\0\1\3\0\0")

    for number in range(5000):
        describe(number)
        describe(number + 1)
        event = feed(EventType.WRITE_ROWS_V1, number.to_bytes(6, "little") + b"\0\0\1\1\0\7\0\0\0")
        assert isinstance(event, RowsEvent)


def test_a_stream_begins_with_a_rotation_before_the_format_is_known() -> None:

    def packet(kind: int, body: bytes, *, has_checksum: bool) -> bytes:
        size = 19 + len(body) + (4 if has_checksum else 0)
        made = struct.pack("<IBIIIH", 0, kind, 1, size, 0, 0x20) + body
        return made + struct.pack("<I", zlib.crc32(made)) if has_checksum else made

    body = struct.pack("<Q", 4) + b"binlog.000007"
    for has_checksum in (True, False):
        event = EventDecoder().feed(packet(EventType.ROTATE, body, has_checksum=has_checksum))
        assert isinstance(event, Rotate)
        assert (event.name, event.position, event.header.is_artificial) == ("binlog.000007", 4, True)
    decoder = EventDecoder()
    decoder.feed(next(packets_of(RECORDED / "mysql-9.7.bin")))
    for has_checksum in (True, False):  # of the next file, which may have none
        event = decoder.feed(packet(EventType.ROTATE, body, has_checksum=has_checksum))
        assert isinstance(event, Rotate)
        assert event.name == "binlog.000007"
    beat = decoder.feed(packet(EventType.HEARTBEAT, b"binlog.000009", has_checksum=True))
    assert isinstance(beat, Heartbeat)
    assert beat.name == "binlog.000009"
    later = b"\x01\x0dbinlog.000010\x02\x09\xfe" + struct.pack("<Q", 5_000_000_000) + b"\x00"
    beat = decoder.feed(packet(EventType.HEARTBEAT_V2, later, has_checksum=True))
    assert isinstance(beat, Heartbeat)
    assert (beat.name, beat.position) == ("binlog.000010", 5_000_000_000)


def test_recorded_transactions_have_their_names() -> None:
    events = list(events_of(RECORDED / "mysql-9.7.bin"))
    assert isinstance(events[0], FormatDescription)
    gtids = [event for event in events if isinstance(event, Gtid)]
    assert {gtid.tag for gtid in gtids} == {"tag"}
    assert [gtid.number for gtid in gtids] == list(range(1, len(gtids) + 1))
    begins = [event for event in events if isinstance(event, Query) and event.is_begin]
    assert len(begins) == sum(isinstance(event, Xid) for event in events) == len(gtids) - 1


def test_a_tagged_gtid_is_a_list_of_numbered_fields() -> None:
    uuid = UUID("01020304-0506-0708-090a-0b0c0d0e0fff")
    body = bytes((2, 0x7C, 0, 0, 2, 2))
    body += b"".join(
        bytes([byte << 1]) if byte < 128 else bytes((byte << 2 & 0xFC | 1, byte >> 6)) for byte in uuid.bytes
    )
    body += bytes((4, 4)) + bytes((6, 6)) + b"abc" + bytes((8, 0, 10, 4, 12, 0x10, 16, 0x45, 0x05))
    gtid = parse_tagged_gtid(HEADER, Cursor(body))
    assert gtid.text == f"{uuid}:abc:1"
    assert (gtid.sequence_number, gtid.commit_time, gtid.transaction_size) == (1, 8, 337)


def test_documents_that_point_at_each_other_neither_run_forever_nor_grow() -> None:
    # an array of many entries that are all one long string
    text = b"\x0c" + b"\xff\x01" + b"x" * 255
    count = 1000
    place = 8 + count * 5
    entries = b"".join(b"\x0c" + place.to_bytes(4, "little") for _ in range(count))
    content = text[1:]
    whole = place + len(content)
    document = b"\x03" + count.to_bytes(4, "little") + whole.to_bytes(4, "little") + entries + content
    with pytest.raises(SourceProtocolError, match="more than its bytes"):
        json_text(document)
    column = BinlogColumn(ColumnType.JSON, 4, 0, nullable=True, name="j")
    plan = TablePlan("t", (ColumnPlan(column, pa.string(), "json", name="j"),))
    event = rows_events_of(RECORDED / "mysql-9.7.bin", "t")[0]
    data = b"\x00" + len(document).to_bytes(4, "little") + document
    made = RowsEvent(event.header, event.table, event.kind, b"\x01", None, True, data, 0, len(data))
    for make in DECODERS:
        with pytest.raises(SourceProtocolError, match="more than its bytes"):
            RowsDecoder(plan, make).add(made, 0, 0)


def test_parts_of_documents_are_put_in_their_places() -> None:
    small = b"\x00\x01\x00\x0c\x00\x0b\x00\x01\x00\x05\x01\x00a"  # {"a": 1}
    assert json_text(small) == b'{"a": 1}'
    assert json_text(print_document(parse_document(small))) == b'{"a": 1}'
    number = b"\x05\x07\x00"
    diffs = b"\x01\x05$.bcd" + b"\x03" + number + b"\x00\x03$.a" + b"\x03" + number
    assert json_text(apply_diffs(small, diffs)) == b'{"a": 7, "bcd": 7}'
    assert json_text(apply_diffs(small, b"\x02\x03$.a")) == b"{}"
    assert parse_path(b'$.a[10]."b \\"c\\u00e4".d') == [b"a", 10, 'b "cä'.encode(), b"d"]
    for path in (b"", b"a", b"$[x]", b'$."open', b"$[", b"$x"):
        with pytest.raises(SourceProtocolError):
            parse_path(path)
    with pytest.raises(SourceProtocolError, match="does not have"):
        apply_diffs(small, b"\x02\x03$.x")


def test_what_a_table_map_does_not_tell_is_refused_with_the_setting() -> None:
    column = BinlogColumn(ColumnType.VARCHAR, 10, 0, nullable=True, name="v")
    with pytest.raises(SourceMisconfigured, match="binlog_row_metadata = FULL"):
        make_rows_decoder(TablePlan("t", (ColumnPlan(column, pa.string(), "varchar", name="v"),)))
    column = BinlogColumn(ColumnType.ENUM, 1, 0, nullable=True, name="e", collation=45)
    with pytest.raises(SourceMisconfigured, match="binlog_row_metadata = FULL"):
        make_rows_decoder(TablePlan("t", (ColumnPlan(column, pa.string(), "enum", name="e"),)))


def test_python_alone_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled()
    monkeypatch.setenv("HEADWATER_PURE", "1")
    assert not is_compiled()


def test_a_table_with_a_type_that_is_not_known_passes_unless_somebody_wants_it() -> None:
    packets = list(packets_of(RECORDED / "mariadb-10.11.bin"))
    decoder, seen = EventDecoder(), 0
    for packet in packets:
        if packet[4] == EventType.TABLE_MAP:
            place = packet.index(b"shop\0\x01t\0\x15") + len(b"shop\0\x01t\0\x15")
            body = packet[:place] + b"\x14" + packet[place + 1 : -4]  # an array, which no row can have
            packet = body + struct.pack("<I", zlib.crc32(body))
        event = decoder.feed(packet)
        if isinstance(event, RowsEvent):
            seen += 1
            assert (event.table.name, event.table.unknown_type, event.table.columns) == ("t", 20, ())
            with pytest.raises(SourceProtocolError):
                RowsDecoder(TablePlan("t", ()), PythonRows).add(event, 0, 0)
    assert seen == 6
