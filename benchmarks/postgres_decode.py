"""Postgres: from replication messages to typed columns.

The table has ten columns (bigint, integer, numeric(18,4), two texts, two timestamps with time zone, jsonb, boolean,
uuid), in transactions of 100 rows. Bounds of the same run: a copy of all messages through memory (the least that any
pass over them costs), and the decoder in Python.
"""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable

import pyarrow as pa

from _harness import Figure, interleaved, main, progress
from headwater.sources.postgres.convert import convert_columns
from headwater.sources.postgres.csv import read_csv
from headwater.sources.postgres.decoder import CompiledDecoder, PythonDecoder, RawRows, RowDecoder, is_compiled
from headwater.sources.postgres.pgoutput import raw_message
from headwater.sources.table import SourceColumn, SourceTable

OID = 16384
BATCH = 10_000
COLUMNS = (
    ("id", pa.int64(), "bigint"),
    ("quantity", pa.int32(), "integer"),
    ("price", pa.decimal128(18, 4), "numeric(18,4)"),
    ("name", pa.string(), "text"),
    ("note", pa.string(), "text"),
    ("created", pa.timestamp("us", tz="UTC"), "timestamp with time zone"),
    ("changed", pa.timestamp("us", tz="UTC"), "timestamp with time zone"),
    ("details", pa.string(), "jsonb"),
    ("open", pa.bool_(), "boolean"),
    ("token", pa.string(), "uuid"),
)
TABLE = SourceTable(
    "public",
    "orders",
    tuple(
        SourceColumn(name, kind, source_type, place, nullable=name != "id")
        for place, (name, kind, source_type) in enumerate(COLUMNS, 1)
    ),
    ("id",),
)


def _rows(count: int) -> list[list[str]]:
    chance = random.Random(1)
    return [
        [
            str(number * 7919),
            str(number % 1000),
            f"{chance.randrange(10**6)}.{chance.randrange(10**4):04}",
            f"customer {number % 977}",
            f"a note of usual length for row number {number}",
            f"2026-01-{number % 28 + 1:02} 00:00:00.{chance.randrange(1, 10**6):06}+00",
            f"2026-03-{number % 28 + 1:02} 12:34:56.123456+00",
            f'{{"kind": {number % 7}, "tags": ["a", "b"], "text": "hello {number}"}}',
            "t" if number % 3 else "f",
            str(uuid.UUID(int=chance.getrandbits(128))),
        ]
        for number in range(count)
    ]


def _messages(rows: list[list[str]]) -> list[bytes]:
    made = []
    for number, row in enumerate(rows):
        lsn = number // 100 * 1000
        if number % 100 == 0:
            made.append(raw_message(b"B" + struct.pack(">QqI", lsn, number, number)))
        values = b"".join(b"t" + struct.pack(">i", len(text)) + text.encode() for text in row)
        made.append(raw_message(b"I" + struct.pack(">IBh", OID, ord("N"), len(row)) + values))
        if number % 100 == 99:
            made.append(raw_message(b"C" + struct.pack(">bQQq", 0, lsn, lsn + 8, number)))
    return made


def _decode(make: Callable[[], RowDecoder], messages: list[bytes]) -> list[RawRows]:
    decoder = make()
    decoder.add_relation(OID, len(COLUMNS), [0])
    taken, place = [], 0
    while place < len(messages):
        place = decoder.feed(messages, place, max_rows=BATCH, max_bytes=1 << 26, stop_at_commit=False)
        taken += decoder.take()
    return taken


def _convert(taken: list[RawRows]) -> list[list[pa.Array]]:
    return [convert_columns(TABLE, [column.text for column in rows.columns]) for rows in taken]


def _csv(rows: list[list[str]]) -> bytes:
    quoted = [[*row[:7], '"' + row[7].replace('"', '""') + '"', *row[8:]] for row in rows]
    return "".join(",".join(row) + "\n" for row in quoted).encode()


def measure(quick: bool) -> list[Figure]:
    count, times = (20_000, 5) if quick else (200_000, 7)
    with progress("Postgres rows to columns"):
        rows = _rows(count)
        messages, text = _messages(rows), _csv(rows)
        taken = _decode(PythonDecoder, messages)
        make: Callable[[], RowDecoder] = CompiledDecoder if is_compiled() else PythonDecoder
        jobs: list[Callable[[], object]] = [
            lambda: b"".join(messages),
            lambda: _decode(PythonDecoder, messages),
            lambda: _decode(make, messages),
            lambda: _convert(taken),
            lambda: _convert(_decode(make, messages)),
            lambda: read_csv(TABLE, text),
        ]
        copy, python, compiled, converting, both, csv = (count / seconds for seconds in interleaved(times, *jobs))
    name, goal = ("compiled", 4.0) if is_compiled() else ("Python", None)
    return [
        Figure("Python decoder vs copy of the messages", python, copy, None, "higher", "rows/s"),
        Figure(f"{name} decoder vs copy of the messages", compiled, copy, None, "higher", "rows/s"),
        Figure(f"{name} decoder vs Python decoder", compiled, python, goal, "higher", "rows/s"),
        Figure("text to typed columns vs Python decoder", converting, python, 4.0, "higher", "rows/s"),
        Figure(f"messages to typed columns, {name}, vs Python decoder", both, python, None, "higher", "rows/s"),
        Figure("csv to typed columns vs messages to typed columns", csv, both, None, "higher", "rows/s"),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
