"""MongoSnapshots: reads collections at a cluster time; see :class:`.offset.MongoMark` and :mod:`.part`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.errors import BSONError

from headwater.sources.errors import InvalidRange, UnsupportedTable
from headwater.sources.key_places import DigitOrder, Digits, byte_ranks
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Client, Dsn, server_errors, shared
from headwater.sources.mongodb.documents.errors import UnreadableKey
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.mongodb.documents.types import Kind, column_type
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoMark, MongoOffset
from headwater.sources.mongodb.part import (
    CODEC,
    PartReader,
    finds,
    order_key,
    raw_id,
    read_concern,
    read_value,
    text_of,
    value_of,
)
from headwater.sources.mongodb.server import Server, operation_time
from headwater.sources.position_snapshots import PositionSnapshot
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

_CLASSES: Final = {
    Kind.INT: 0x0A,
    Kind.LONG: 0x0A,
    Kind.STRING: 0x0F,
    Kind.UUID: 0x1E,
    Kind.OBJECT_ID: 0x23,
    Kind.BOOL: 0x28,
    Kind.DATE: 0x2D,
    Kind.TIMESTAMP: 0x2F,
}
"""The first byte of the keys of each type, see :mod:`.documents.key_order`."""
_BEFORE, _AMONG, _AFTER = -1, 0, 1
_INT64: Final = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class MongoKeyOrder(DigitOrder):
    """Where keys lie between cuts, in the order that MongoDB has for values of any type. Pure.

    A key column is bytes in that order, or of one type whose order is known. A cut may be of any type: types have an
    order among them, so that one of another type lies before all keys or after all of them.

    :param kind: of the key column.
    """

    kind: Kind

    @classmethod
    def of(cls, table: SourceTable) -> MongoKeyOrder:
        """:raises UnsupportedTable: its keys are of a type whose order is not known."""
        column = table.column(table.key_columns[0])
        kind = column_type(column).kind
        if kind is not Kind.KEY and kind not in _CLASSES:
            raise UnsupportedTable(
                table.full_name,
                f"the order of keys of type {column.source_type} is not known.",
                next_step='Declare _id = "key" for it, or leave _id out of its columns.',
            )
        return cls(kind)

    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        if self.kind is Kind.KEY:
            return byte_ranks(keys, pa.array([order_key(text) for text in texts], pa.binary()))
        own = _CLASSES[self.kind]
        sides: list[int] = []
        values: list[Any] = []
        for text in texts:
            found = id_key(raw_id(text))[0]
            side, value = (_AMONG, value_of(text)) if found == own else (_BEFORE if found < own else _AFTER, None)
            if side == _AMONG:
                side, value = _READ[self.kind](value)
            sides.append(side)
            values.append(value)
        digits: Digits = [(np.zeros(len(keys), np.int64), np.array(sides, np.int64))]
        return digits + self._inner(keys, values)

    def _inner(self, keys: pa.Array, values: list[Any]) -> Digits:
        if self.kind in (Kind.STRING, Kind.UUID, Kind.OBJECT_ID):
            return byte_ranks(keys, pa.array([value or "" for value in values], pa.string()))
        if self.kind in (Kind.INT, Kind.LONG):
            whole = np.array([0 if value is None else value[0] for value in values], np.int64)
            part = np.array([0 if value is None else value[1] for value in values], np.int64)
            numbers = keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
            return [(numbers, whole), (np.zeros(len(keys), np.int64), part)]
        kind = np.uint64 if self.kind is Kind.TIMESTAMP else np.int64
        of_cuts = np.array([value or 0 for value in values], kind)
        return [(keys.cast(pa.from_numpy_dtype(kind)).to_numpy(zero_copy_only=False).astype(kind), of_cuts)]


def _number(value: Any) -> tuple[int, Any]:
    """The whole number at or below a value of any number type, and whether there is more to it."""
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    if number != number:
        return _BEFORE, None
    if number in (math.inf, -math.inf, Decimal("Infinity"), Decimal("-Infinity")):
        return (_AFTER if number > 0 else _BEFORE), None
    whole = math.floor(number)
    if not _INT64[0] <= whole <= _INT64[1]:
        return (_AFTER if whole > 0 else _BEFORE), None
    return _AMONG, (whole, int(whole != number))


def _uuid(value: Any) -> tuple[int, Any]:
    """Bytes are ordered by their length, then by their subtype."""
    subtype = value.subtype if isinstance(value, Binary) else 0
    if (len(value), subtype) != (16, 4):
        return (_BEFORE if (len(value), subtype) < (16, 4) else _AFTER), None
    text = bytes(value).hex()
    return _AMONG, "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _date(value: Any) -> tuple[int, Any]:
    return _AMONG, int(value) if isinstance(value, DatetimeMS) else int(DatetimeMS(value))


_READ: Final[dict[Kind, Callable[[Any], tuple[int, Any]]]] = {
    Kind.INT: _number,
    Kind.LONG: _number,
    Kind.STRING: lambda value: (_AMONG, str(value)),
    Kind.UUID: _uuid,
    Kind.OBJECT_ID: lambda value: (_AMONG, str(value)),
    Kind.BOOL: lambda value: (_AMONG, int(value)),
    Kind.DATE: _date,
    Kind.TIMESTAMP: lambda value: (_AMONG, value.time << 32 | value.inc),
}


STEPPED: Final = 1_000_000
PER_SPLIT: Final = 40
"""Keys of the sample for each split."""
MOST_SAMPLED: Final = 100_000


def plan_splits(client: Client, table: SourceTable, at: int, split_rows: int, kind: SplitKind | None) -> SplitPlan:
    """Splits of about *split_rows* documents of *table*. :raises UnsupportedTable: by heap.

    ==================================  ==============================================================================
    up to 1,000,000 documents           every n-th key, exactly, by steps along the index of ``_id``
    more                                keys of a random sample, at equal distances: as many keys lie between two
                                        cuts, about, wherever they are crowded; only the sample is read for it
    ==================================  ==============================================================================

    Cuts are keys that are there, of any type. The first split has no start and the last no end.
    """
    if kind is SplitKind.HEAP:
        raise UnsupportedTable(
            table.full_name,
            "its documents have no place but their key.",
            next_step="Set split_kind to key, or leave it out.",
        )
    rows, size = _extent(client, table)
    if split_rows >= rows > STEPPED:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), rows),), rows, size, "1 range: all of it.")
    if rows <= STEPPED:
        cuts = _stepped(client, table, at, split_rows)
        why = f"{len(cuts) + 1} ranges of keys: every {split_rows:,}th, by steps along the index of _id."
    else:
        cuts = _sampled(client, table, rows, split_rows)
        why = f"{len(cuts) + 1} ranges of keys: between those of a random sample, at equal distances."
    ends = [None, *(Cut((text,)) for text in cuts), None]
    each = max(1, rows // (len(cuts) + 1))
    splits = tuple(Split(number, KeyRange(*pair), each) for number, pair in enumerate(pairwise(ends)))
    return SplitPlan(SplitKind.KEY, splits, rows, size, why)


def page_end(client: Client, table: SourceTable, at: int, part: KeyRange, rows: int) -> Cut | None:
    """The cut after the first *rows* documents of *part*; ``None`` when it has no more than that, or one more."""
    command = next(finds(table.name, part), None)
    found = [] if command is None or "sort" not in command else _keys(client, table, at, command, rows)
    return Cut((found[0],)) if found else None


def _keys(client: Client, table: SourceTable, at: int, command: dict[str, Any], skipped: int) -> list[str]:
    """The key of the document after the first *skipped*, if there is one."""
    with _readable(table):
        answer = client[table.namespace].command(
            {
                **command,
                "projection": {"_id": 1},
                "skip": skipped,
                "limit": 1,
                "singleBatch": True,
                "readConcern": read_concern(at),
            },
            codec_options=CODEC,
        )
    return [text_of(document["_id"]) for document in answer["cursor"]["firstBatch"]]


def _extent(client: Client, table: SourceTable) -> tuple[int, int]:
    """About how many documents and bytes it has, by the server's statistics."""
    pipeline: list[dict[str, Any]] = [{"$collStats": {"storageStats": {}}}]
    rows = size = 0
    for answer in client[table.namespace][table.name].aggregate(pipeline):  # one of each shard
        rows += int(answer["storageStats"].get("count", 0))
        size += int(answer["storageStats"].get("size", 0))
    return rows, size


def _stepped(client: Client, table: SourceTable, at: int, split_rows: int) -> list[str]:
    cuts: list[str] = []
    while True:
        part = KeyRange(Cut((cuts[-1],)) if cuts else None)
        command = next(finds(table.name, part))
        found = _keys(client, table, at, command, split_rows)
        if not found:
            return cuts
        cuts.append(found[0])


def _sampled(client: Client, table: SourceTable, rows: int, split_rows: int) -> list[str]:
    count = -(-rows // split_rows)
    size = min(MOST_SAMPLED, PER_SPLIT * count)
    pipeline = [{"$sample": {"size": size}}, {"$project": {"_id": 1}}]
    collection = client[table.namespace].get_collection(table.name, codec_options=CODEC)
    with _readable(table):
        found = sorted({text_of(document["_id"]) for document in collection.aggregate(pipeline)}, key=order_key)
    return at_equal_distances(found, count)


@contextmanager
def _readable(table: SourceTable) -> Iterator[None]:
    """:raises UnreadableKey: an answer has a key that is no value."""
    try:
        yield
    except BSONError:
        raise UnreadableKey(table.full_name, "a text that is not UTF-8") from None


def at_equal_distances(keys: Sequence[str], count: int) -> list[str]:
    """Of ascending *keys* those that divide them into *count* parts of the same number, or fewer where keys lack."""
    places = sorted({place * len(keys) // count for place in range(1, count)} - {0})
    return [keys[place] for place in places]


LATE_SECONDS: Final = 0.2
"""In which shards write a transaction over several of them that readers see already; see :mod:`.offset`."""


class MongoSnapshot(PositionSnapshot[Client, int, MongoMark]):
    """A cluster time that tasks read at, and what is planned there. One thread.

    It keeps nothing open: the time is enough to read at, for as long as the server keeps what was
    (``minSnapshotHistoryWindowInSeconds``, 5 minutes by default).

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """

    def __init__(self, dsn: Dsn) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn = dsn
        with server_errors(dsn):
            client = shared(dsn)
            at, until = MongoOffset(operation_time(client)), None
            if Server.ask(client, dsn).commit_options:
                time.sleep(LATE_SECONDS)
                until = MongoOffset(operation_time(client))
            self._mark = MongoMark(at, until)

    def table(self, table: SourceTable) -> SourceTable:
        """*table*, whose columns are settled here; with the number that the collection has now.

        :raises SourceNotFound: the server has no such collection.
        """
        with self._asked() as client:
            collection = catalog.find(client, CollectionName(table.namespace, table.name))
        self._catalog(table)
        return replace(table, source_id=collection.source_id)

    def close(self) -> None:
        """Nothing is held. Closing twice is fine."""

    @contextmanager
    def _asked(self) -> Iterator[Client]:
        with server_errors(self._dsn):
            yield shared(self._dsn)

    def _ping(self, session: Client) -> None:
        """Whether the server still shows a table that was asked for as it was."""
        for namespace, name in list(self._catalogs)[-1:]:
            session[namespace].command(
                {
                    "find": name,
                    "limit": 1,
                    "singleBatch": True,
                    "projection": {"_id": 1},
                    "readConcern": read_concern(self._mark.at.time),
                }
            )

    def _read(self, session: Client, table: SourceTable) -> int:
        return self._mark.at.time


class MongoSnapshots:
    """The snapshots of one deployment; see :class:`~headwater.sources.snapshots.SnapshotSource`.

    :param dsn: ``mongodb://user:password@host:27017/database?replicaSet=rs0``.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = Dsn(dsn)
        self._remarks: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"MongoSnapshots({str(self._dsn)!r})"

    def export(self) -> MongoSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return MongoSnapshot(self._dsn)

    def order(self, table: SourceTable) -> MongoKeyOrder:
        """The order of its keys. :raises UnsupportedTable: they are of a type whose order is not known."""
        return MongoKeyOrder.of(table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        start, end = (None if cut is None else _read(table, cut) for cut in (part.start, part.end))
        if start is not None and end is not None and order_key(start.values[0]) > order_key(end.values[0]):
            raise InvalidRange(
                f"The range of keys of {table.full_name} ends before it begins.",
                next_step="Name the smaller key first.",
            )
        return KeyRange(start, end)

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot*; see :class:`~headwater.sources.snapshots.SnapshotSource`."""
        at = None if snapshot is None else MongoMark.from_fields(json.loads(snapshot)["MongoDb"]).at.time
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        remarks = self._remarks.setdefault(table.full_name, [])
        return PartReader(self._dsn, shared(self._dsn), table, part, at, wanted, remarks).batches()

    def take_remarks(self, table: SourceTable) -> list[str]:
        """See :class:`~headwater.sources.snapshots.RemarkingSnapshots`: values that columns did not take."""
        found = self._remarks.get(table.full_name, [])
        taken, found[:] = list(found), []  # a read that goes on adds to the same list
        return taken


def _read(table: SourceTable, cut: Cut) -> Cut:
    if len(cut.values) != 1:
        raise InvalidRange(
            f"The key of {table.full_name} is one value; received {len(cut.values)}.", next_step="Give one value."
        )
    return Cut((read_value(table, cut.values[0]),), cut.after)
