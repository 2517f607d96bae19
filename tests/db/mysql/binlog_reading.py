"""Reads the files of a server's binlog, and decodes the rows of a table in them, for the tests of the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.servers.mariadb import MariaDbServer

from headwater.sources.mysql.binlog._row_decoder import Decoder
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import MAGIC, Event, RowsEvent, TransactionPayload
from headwater.sources.mysql.binlog.python_rows import PythonRows
from headwater.sources.mysql.binlog.row_layout import ColumnPlan, DecodedRows, TablePlan
from headwater.sources.mysql.binlog.rows import RowsDecoder
from headwater.sources.mysql.binlog.table_map import TableMap
from headwater.sources.mysql.definitions import type_text
from headwater.sources.mysql.types import MySqlType, arrow_type
from headwater.sources.table import SpecialValues

DECODERS: list[type[Decoder | PythonRows]] = [Decoder, PythonRows]


def packets_of(path: Path) -> Iterator[bytes]:
    """The event packets of a binlog file."""
    data, place = path.read_bytes(), 4
    assert data[:4] == MAGIC
    while place < len(data):
        size = int.from_bytes(data[place + 9 : place + 13], "little")
        yield data[place : place + size]
        place += size


def closed_file(server: MariaDbServer) -> Path:
    """The newest file, which the server has just closed."""
    name = server.execute("SHOW BINARY LOGS")[-1][0]
    server.execute("FLUSH BINARY LOGS")
    return server.data / str(name)


def events_of(path: Path) -> Iterator[Event]:
    """All events of a file, with those of compressed transactions."""
    decoder = EventDecoder()
    for packet in packets_of(path):
        event = decoder.feed(packet)
        yield event
        if isinstance(event, TransactionPayload):
            yield from (decoder.feed_inner(inner) for inner in event.packets)


def rows_events_of(path: Path, table: str) -> list[RowsEvent]:
    return [event for event in events_of(path) if isinstance(event, RowsEvent) and event.table.name == table]


def plan_of(
    table: TableMap,
    source_types: dict[str, str] | None = None,
    special: SpecialValues = SpecialValues.STOP,
    types: dict[str, pa.DataType] | None = None,
) -> TablePlan:
    """What the source would plan for a table, with other types where they are given."""
    columns = []
    for column in table.columns:
        name = column.name or ""
        text = (source_types or {}).get(name, type_text(column))
        kind = (types or {}).get(name, arrow_type(MySqlType.parse(text)))
        if special is SpecialValues.TEXT:
            kind = pa.string()
        columns.append(ColumnPlan(column, kind, text, special, name))
    return TablePlan(f"{table.database}.{table.name}", tuple(columns))


def decode(make: type[Decoder | PythonRows], events: list[RowsEvent], plan: TablePlan) -> DecodedRows:
    decoder, seq = RowsDecoder(plan, make), 0
    for event in events:
        seq = decoder.add(event, 7, seq)
    return decoder.take()


def columns_of(rows: DecodedRows, table: TableMap) -> dict[str, list[Any]]:
    """The values of each column by its name; moments as numbers, because Python has no UTC of its own."""
    found = {}
    for told, column in zip(table.columns, rows.columns, strict=True):
        assert column is not None
        found[told.name or ""] = column.values.to_pylist()
    return found
