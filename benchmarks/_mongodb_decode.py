"""Raw BSON into columns, and events of a change stream, against ``bson.decode_all`` of the same bytes.

The documents are of the kind that shops have: an ObjectId, numbers, texts, dates, a Decimal128, an array of objects.
The library returns Python objects, which are not columns yet; ours returns columns.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import bson
from bson.codec_options import CodecOptions

from _harness import Figure, interleaved, progress
from headwater.sources.mongodb.documents import python_documents
from headwater.sources.mongodb.documents.columns import CollectionColumns, declared_columns, document_columns
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.documents.layout import Codec, codec
from headwater.sources.table import SourceTable

BATCH = 10_000
TYPES = {
    "_id": "objectId",
    "customer": "string",
    "quantity": "int",
    "total": "long",
    "price": "decimal(18,4)",
    "discount": "double",
    "open": "bool",
    "created": "date",
    "note": "string",
    "address": "struct<city: string, zip: string>",
    "lines": "array<struct<sku: string, count: int>>",
}
JSON_TYPES = {**TYPES, "address": "json", "lines": "json"}
_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=True)


def order(number: int, chance: random.Random) -> dict[str, Any]:
    """One document of about 400 bytes."""
    return {
        "_id": bson.ObjectId(chance.randbytes(12)),
        "customer": f"customer {number % 977}",
        "quantity": number % 1000,
        "total": bson.Int64(number * 1_000_003),
        "price": bson.Decimal128(f"{number % 10_000}.{number % 10_000:04d}"),
        "discount": (number % 100) / 100,
        "open": number % 3 == 0,
        "created": dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=number * 1001),
        "note": f"a note of usual length for order {number}",
        "address": {"city": "Bruxelles", "zip": f"{number % 10_000:04d}"},
        "lines": [{"sku": f"sku-{chance.randrange(10_000)}", "count": line + 1} for line in range(3)],
    }


def batches(rows: int) -> list[bytes]:
    """Documents as ``find_raw_batches`` gives them."""
    chance = random.Random(7)
    made = [bson.encode(order(number, chance)) for number in range(rows)]
    return [b"".join(made[start : start + BATCH]) for start in range(0, rows, BATCH)]


def event_batches(rows: int) -> list[bytes]:
    """Inserts as a change stream gives them, raw."""
    chance, made = random.Random(7), []
    for number in range(rows):
        document = order(number, chance)
        event = {
            "_id": {"_data": chance.randbytes(60).hex().upper()},
            "operationType": "insert",
            "clusterTime": bson.Timestamp(1_767_225_600 + number // 1000, number % 1000 + 1),
            "wallTime": document["created"],
            "fullDocument": document,
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": document["_id"]},
        }
        made.append(bson.encode(event))
    return [b"".join(made[start : start + BATCH]) for start in range(0, rows, BATCH)]


def decoder(columns: CollectionColumns, used: Codec) -> DocumentDecoder:
    return DocumentDecoder(SourceTable("shop", "orders", columns.columns, columns.key_columns), codec_used=used)


def decode(raw: list[bytes], with_decoder: DocumentDecoder) -> int:
    """How many rows all batches gave."""
    return sum(with_decoder.decode(batch).batch.num_rows for batch in raw)


def decode_events(raw: list[bytes], columns: CollectionColumns, used: Codec) -> int:
    """Events, and then their documents; how many rows."""
    events, documents, rows = EventDecoder(codec_used=used), decoder(columns, used), 0
    for batch in raw:
        rows += documents.decode(events.decode(batch).column("document")).batch.num_rows
    return rows


def by_library(raw: list[bytes]) -> int:
    return sum(len(bson.decode_all(batch, _OPTIONS)) for batch in raw)


def measure_decode(quick: bool) -> list[Figure]:
    """The figures of this module."""
    rows, times = (20_000, 3) if quick else (100_000, 5)
    compiled, declared = codec(), declared_columns(TYPES)
    kinds = {
        "declared columns": declared,
        "declared columns, nested ones as JSON": declared_columns(JSON_TYPES),
        "one document column": document_columns(),
    }
    with progress("documents to columns"):
        raw, events = batches(rows), event_batches(rows)
        jobs: list[Callable[[], object]] = [lambda: by_library(raw), lambda: by_library(events)]
        jobs.append(lambda: decode_events(events, declared, compiled))
        jobs.extend(partial(decode, raw, decoder(columns, compiled)) for columns in kinds.values())
        assert all(job() == rows for job in jobs)
        library, library_events, ours_events, *ours = (rows / taken for taken in interleaved(times, *jobs))
        few = raw[:1]
        python = BATCH / interleaved(1, lambda: decode(few, decoder(declared, python_documents)))[0]
    used = "Python" if compiled is python_documents else "compiled"
    against, unit = "vs bson.decode_all", "documents/s"
    goals = (5.0, 2.0, 2.0)
    return [
        *(
            Figure(f"{used}: {kind} {against}", found, library, goal, "higher", unit)
            for kind, found, goal in zip(kinds, ours, goals, strict=True)
        ),
        Figure(f"{used}: events, their documents {against}", ours_events, library_events, 5.0, "higher", "events/s"),
        Figure(f"Python: declared columns {against}", python, library, None, "higher", unit, 1),
    ]
