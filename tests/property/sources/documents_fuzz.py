"""Feeds mutated documents to the decoders; a program of its own, because what it looks for would end the process.

``python -m tests.property.sources.documents_fuzz SEED SECONDS``: it prints how many batches it fed, how many were
refused and how many rows were decoded. It fails where anything but our errors was raised, or the decoders differ.
"""

from __future__ import annotations

import faulthandler
import random
import struct
import sys
import time
from typing import Any

import bson
import pyarrow as pa
from tests.unit.sources.mongodb.documents_cases import CODECS, EVERY_TYPE, document, table

from headwater.errors import CorruptionError
from headwater.sources.mongodb.documents.columns import inferred_columns
from headwater.sources.mongodb.documents.decoder import Decoded, DocumentDecoder, RawArray
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.table import SourceTable, SpecialValues

LONGEST = 10.0
"""Seconds that one batch may take before it counts as hanging; all are a few KB."""
EXTREMES = (0, 1, 2, 3, 4, 5, 8, 11, 12, 15, 19, 20, 0x7F, 0x80, 0xC0, 0xED, 0xF4, 0xFE, 0xFF)
LENGTHS = (-(2**31), -1, 0, 1, 4, 5, 100, 2**31 - 1)
EVENT: dict[str, Any] = {
    "_id": {"_data": "82", "_typeBits": b"\x01"},
    "operationType": "update",
    "clusterTime": bson.Timestamp(7, 8),
    "wallTime": EVERY_TYPE["date"],
    "lsid": {"id": 1},
    "txnNumber": bson.Int64(5),
    "ns": {"db": "shop", "coll": "orders"},
    "documentKey": {"_id": 1},
    "fullDocument": EVERY_TYPE,
    "updateDescription": {"updatedFields": {}, "removedFields": [], "truncatedArrays": []},
    "splitEvent": {"fragment": 1, "of": 2},
}
TYPES = (
    *(
        "int",
        "long",
        "double",
        "bool",
        "string",
        "objectId",
        "date",
        "timestamp",
        "decimal",
        "decimal(20,4)",
        "binData",
    ),
    *(
        "decimal(76,30)",
        "binData(2)",
        "uuid",
        "json",
        "array<json>",
        "array<array<int>>",
        "struct<a: int, b: json>",
        "raw",
    ),
    *("struct<a: double, b: struct<c: array<string>>>",),
)
_counts = {"batches": 0, "rows": 0, "refused": 0, "conflicts": 0}


def tables(chance: random.Random) -> SourceTable:
    """A table whose columns are of any type, and take nulls for what they do not take."""
    types = {name: chance.choice(TYPES) for name in EVERY_TYPE if chance.random() < 0.6}
    types.update(
        {"whole": "document"} if chance.random() < 0.3 else {}, **({"more": "rest"} if chance.random() < 0.5 else {})
    )
    return table({"_id_key": "key", **types}, dict.fromkeys(types, SpecialValues.NULL))


def documents(chance: random.Random) -> list[bytes]:
    made = []
    for number in range(chance.randrange(1, 6)):
        names = [name for name in EVERY_TYPE if chance.random() < 0.8]
        chance.shuffle(names)
        values = [EVERY_TYPE[name] for name in names]
        if chance.random() < 0.3:
            chance.shuffle(values)
        key = chance.choice([number, *EVERY_TYPE.values()])
        made.append(bson.encode({"_id": key, **dict(zip(names, values, strict=True))}))
    return made


def in_arrow(made: list[bytes]) -> pa.Array:
    return pa.array([*made, None], pa.binary())


def in_an_array(made: list[bytes]) -> RawArray:
    return RawArray(document(*((3, str(place).encode(), one) for place, one in enumerate(made))))


def mutated(whole: bytes, chance: random.Random) -> bytes:
    """Some of its bytes changed, cut or put in; mostly its length fits again."""
    body = bytearray(whole)
    for _ in range(chance.choice((0, 0, 0, 1, 1, 3))):
        place = chance.randrange(len(body)) if body else 0
        match chance.randrange(6):
            case 0:
                body[place : place + 1] = bytes((chance.choice(EXTREMES),))
            case 1:
                body[place : place + 1] = bytes((body[place] ^ 1 << chance.randrange(8),)) if body else b""
            case 2:
                del body[place : place + chance.randrange(1, 9)]
            case 3:
                body[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 4:
                body[place : place + 4] = struct.pack("<i", chance.choice(LENGTHS))
            case _:
                body[place : place + 4] = struct.pack("<i", len(body) - place)
    if chance.random() < 0.8 and len(body) >= 5:
        body[:4] = struct.pack("<i", len(body))
        body[-1] = 0
    return bytes(body)


def outcome(decoder: DocumentDecoder, batch: Any) -> Decoded | str:
    try:
        found = decoder.decode(batch)
    except CorruptionError as error:
        return type(error).__name__
    found.batch.validate(full=True)
    return found


def same(left: Decoded | str, right: Decoded | str) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return left == right
    return left.conflicts == right.conflicts and shown(left.batch) == shown(right.batch)


def shown(batch: pa.RecordBatch) -> str:
    """All values as text, because a NaN is not its equal; dates as numbers, because Python has not all of them."""
    columns = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in batch.columns]
    return str([column.to_pylist() for column in columns])


def feed(chance: random.Random) -> None:
    of = tables(chance)
    made = [mutated(one, chance) for one in documents(chance)]
    batch: Any = chance.choice((b"".join, in_arrow, in_an_array))(made)
    outcomes = [outcome(DocumentDecoder(of, codec_used=codec), batch) for codec in CODECS.values()]
    if any(not same(outcomes[0], other) for other in outcomes[1:]):
        raise AssertionError(f"the decoders differ: {outcomes} of {batch!r} as {of.schema}")
    _counts["batches"] += 1
    if isinstance(outcomes[0], str):
        _counts["refused"] += 1
    else:
        _counts["rows"] += outcomes[0].batch.num_rows
        _counts["conflicts"] += len(outcomes[0].conflicts)


def feed_event(chance: random.Random) -> None:
    batch = mutated(bson.encode(EVENT), chance)
    found = []
    for codec in CODECS.values():
        try:
            found.append(shown(EventDecoder(codec_used=codec).decode(batch)))
        except CorruptionError:
            found.append("refused")
    assert len(set(found)) == 1, f"the decoders differ: {found} of {batch!r}"
    for pure in (id_key, lambda one: inferred_columns([one])):
        try:
            pure(batch)
        except CorruptionError:
            pass


def main(seed: int, seconds: float) -> None:
    faulthandler.enable()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        chance = random.Random(f"{seed} {_counts['batches']}")
        feed(chance)
        feed_event(chance)
    faulthandler.cancel_dump_traceback_later()
    print(*(f"{name}={count}" for name, count in _counts.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
