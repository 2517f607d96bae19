"""Kafka messages: rows as keys and values of messages, JSON both, whole columns at a time. Pure.

The key is an object of the table's key columns, in key order. The value is one of

========================  =========================================================================================
``json``, changes         the table's columns, then those of :mod:`headwater.sinks.change_rows`
``debezium``, changes     Debezium's envelope without schemas: ``before``, ``after``, ``source``, ``op``, ``ts_ms``, …
mirror                    the table's columns; nothing (a tombstone) for a row that is gone
========================  =========================================================================================

An update of which the source tells the old row is two messages in ``json``, as it is two rows in other sinks, and one
in ``debezium``.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater import __version__
from headwater.sinks.change_rows import CHANGE_TYPE, COMMIT_VERSION
from headwater.sinks.json_rows import json_objects, json_texts, objects_of, slices
from headwater.sinks.row_batch import Append
from headwater.sinks.types import array_of
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, SourceTable
from headwater.sources.unavailable import names_column, unavailable_names
from headwater.stream.op import REREAD, Op

Format = Literal["json", "debezium"]
UNAVAILABLE_VALUE: Final = '"__debezium_unavailable_value"'

_ADDED = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN)
_DELETE, _POSTIMAGE, _PREIMAGE = (op.change_type for op in (Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE))


@dataclass(frozen=True, slots=True)
class Messages:
    """Keys and values of some messages; a value that is ``None`` is a tombstone."""

    keys: list[bytes]
    values: list[bytes | None]

    def __len__(self) -> int:
        return len(self.keys)

    def pieces(self, limit: int) -> Iterator[Messages]:
        """In pieces of about *limit* bytes; escaped text may be longer than rows look."""
        count = -(-sum(map(len, filter(None, self.values))) // limit)
        step = max(-(-len(self) // max(count, 1)), 1)
        for start in range(0, len(self), step):
            yield Messages(self.keys[start : start + step], self.values[start : start + step])


def key_texts(table: SourceTable, rows: pa.Table) -> Any:
    """The keys of *rows*."""
    return json_objects({name: rows.column(name) for name in table.key_columns}, rows.num_rows)


def row_messages(table: SourceTable, rows: pa.Table) -> Messages:
    """Rows of a mirror."""
    values = json_objects({name: rows.column(name) for name in rows.schema.names}, rows.num_rows)
    return Messages(_bytes(key_texts(table, rows)), _bytes(values))


def key_messages(table: SourceTable, keys: pa.Table) -> Messages:
    """Rows that are gone of a mirror."""
    return Messages(_bytes(key_texts(table, keys)), [None] * keys.num_rows)


class ChangeMessages:
    """Changes of one batch of *table*, one piece after the other: the halves of an update may be in two of them.

    :param source: what Debezium's ``source`` calls the connector. :param now_us: what ``ts_us`` says.
    :param tombstones: each delete is followed by a tombstone.
    """

    def __init__(self, table: SourceTable, how: Format, *, source: str, now_us: int, tombstones: bool) -> None:
        self._table, self._format, self._source, self._now_us = table, how, source, now_us
        self._tombstones = tombstones
        self._held: pa.Table | None = None

    def of(self, step: Append) -> Iterator[Messages]:
        rows = step.rows
        if self._format == "debezium":
            if self._held is not None:
                rows = pa.concat_tables([self._held, rows])
                self._held = None
            if rows.column(CHANGE_TYPE)[-1].as_py() == _PREIMAGE:
                self._held = rows.slice(rows.num_rows - 1)
                rows = rows.slice(0, rows.num_rows - 1)
            yield from self._debezium(rows, is_history=step.is_history)
            return
        for piece in slices(rows):
            values = json_objects({name: piece.column(name) for name in piece.schema.names}, piece.num_rows)
            yield self._with_tombstones(piece, values)

    def _debezium(self, rows: pa.Table, *, is_history: bool) -> Iterator[Messages]:
        own = rows.select([name for name in rows.schema.names if name not in _ADDED])
        types = _numpy(rows.column(CHANGE_TYPE))
        shown = np.flatnonzero(types != _PREIMAGE)
        pairs = (types[shown] == _POSTIMAGE) & (shown > 0) & (types[shown - 1] == _PREIMAGE)
        before = np.where(pairs, shown - 1, np.where(types[shown] == _DELETE, shown, -1))
        after = np.where(types[shown] == _DELETE, -1, shown)
        for start, piece in _parts(slices(rows.take(pa.array(shown)))):
            places = slice(start, start + piece.num_rows)
            told = rows.column(UNAVAILABLE_COLUMN)
            values = self._envelopes(
                piece, _images(own, told, before[places]), _images(own, told, after[places]), is_history=is_history
            )
            yield self._with_tombstones(piece, values)

    def _envelopes(self, rows: pa.Table, before: Any, after: Any, *, is_history: bool) -> Any:
        times_us = pc.fill_null(rows.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()), 0)
        micros = json_texts(times_us)
        millis = json_texts(pc.floor(pc.divide(times_us.cast(pa.float64()), 1000.0)).cast(pa.int64()))
        source = {
            "version": json.dumps(__version__),
            "connector": '"headwater"',
            "name": json.dumps(self._source),
            "ts_ms": millis,
            "snapshot": pc.if_else(_is_reread(rows), '"incremental"', '"true"' if is_history else '"false"'),
            "db": '""',
            "schema": json.dumps(self._table.namespace, ensure_ascii=False),
            "table": json.dumps(self._table.name, ensure_ascii=False),
            "ts_us": micros,
            "commit_version": json_texts(rows.column(COMMIT_VERSION)),
        }
        envelope = {
            "before": before,
            "after": after,
            "source": objects_of(source, rows.num_rows),
            "op": _ops(rows.column(CHANGE_TYPE), is_history=is_history),
            "ts_ms": str(self._now_us // 1000),
            "ts_us": str(self._now_us),
        }
        return objects_of(envelope, rows.num_rows)

    def _with_tombstones(self, rows: pa.Table, values: Any) -> Messages:
        keys, texts = _bytes(key_texts(self._table, rows)), _bytes(values)
        gone = np.flatnonzero(_numpy(rows.column(CHANGE_TYPE)) == _DELETE) if self._tombstones else ()
        for place in reversed(gone):
            keys.insert(place + 1, keys[place])
            texts.insert(place + 1, None)
        return Messages(keys, texts)


def keys_of(table: SourceTable, own: pa.Schema, keys: Iterable[bytes]) -> pa.Table:
    """The keys of messages as rows: the inverse of :func:`key_texts`."""
    found = [json.loads(key) for key in keys]
    schema = pa.schema([own.field(name) for name in table.key_columns])
    return pa.table([_typed([row[one.name] for row in found], one.type) for one in schema], schema=schema)


def _typed(values: list[Any], kind: pa.DataType) -> Any:
    if pt.is_binary(kind):
        return pa.array([None if value is None else b64decode(value) for value in values], kind)
    if pt.is_decimal(kind) or pt.is_temporal(kind):
        return pc.cast(pa.array(values, pa.string()), kind)
    if pt.is_floating(kind):
        return pa.array([None if value is None else float(value) for value in values], kind)
    return pa.array(values, kind)


def _images(own: pa.Table, unavailable: Any, places: Any) -> Any:
    """The rows at *places* as objects; ``null`` where the place is -1."""
    is_there = places >= 0
    if not is_there.any():
        return "null"
    taken = pa.array(places, mask=~is_there)
    told = unavailable.take(taken)
    texts: dict[str, Any] = {}
    lacking = set(unavailable_names(told, own.schema.names))
    for name in own.schema.names:
        texts[name] = json_texts(own.column(name).take(taken), of_debezium=True)
        if name in lacking:
            texts[name] = pc.if_else(pa.array(names_column(told, name)), UNAVAILABLE_VALUE, texts[name])
    return pc.if_else(pa.array(is_there), objects_of(texts, len(places)), "null")


def _is_reread(rows: pa.Table) -> Any:
    return pc.equal(array_of(rows.column(CHANGE_TYPE)), REREAD)


def _ops(types: Any, *, is_history: bool) -> Any:
    made = pa.repeat(pa.scalar('"c"'), len(types))
    if is_history:
        made = pa.repeat(pa.scalar('"r"'), len(types))
    made = pc.if_else(pc.equal(array_of(types), _POSTIMAGE), '"u"', made)
    return pc.if_else(pc.equal(array_of(types), _DELETE), '"d"', made)


def _parts(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    start = 0
    for one in tables:
        yield start, one
        start += one.num_rows


def _bytes(texts: Any) -> list[Any]:
    found: list[Any] = array_of(texts).cast(pa.binary()).to_pylist()
    return found


def _numpy(values: Any) -> Any:
    return array_of(values).to_numpy(zero_copy_only=False)


def merged(new: Sequence[bytes], old: Sequence[bytes | None]) -> list[bytes]:
    """Rows of a mirror of which some columns are told, with the others from the rows of before."""
    pairs = zip(new, old, strict=True)
    return [one if was is None else _text({**json.loads(was), **json.loads(one)}) for one, was in pairs]


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
