"""Frames: the tables of a derivation as DataFrames at an epoch, whole or only the rows of some keys; and its result,
staged by tasks.

Rows are read and staged where tasks run, in Arrow batches; what comes back to the driver is what was staged.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import types as st

from headwater.derive.affected import KeyFilter
from headwater.derive.errors import KeyNotUnique
from headwater.errors import HeadwaterError
from headwater.log_store.columns import OP, read_schema
from headwater.sinks.keys import same_rows
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.spark.failure import Failure, ToldError, told
from headwater.spark.kept_rows import KeptRead
from headwater.spark.session import hot
from headwater.spark.types import Shape
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT
from headwater.stream.op import Op

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SIDE: Final = "_side"
OLD, NEW = 0, 1
POSITION: Final = pa.binary(16)

I64 = NDArray[np.int64]


def differences(table: SourceTable, batches: Iterable[pa.RecordBatch], epoch: int) -> Iterator[pa.RecordBatch]:
    """The changes of *epoch* that turn an old result into a new one, as the log of *table* would have them. Pure.

    Both results come in one stream, ordered by key and then old before new, as a sort of Spark gives it. A key that
    only the old one has is deleted, one that only the new one has is inserted, and one whose values differ is updated;
    equal rows make nothing. What is held is one batch and the last key of the one before.

    :param batches: rows of the table's columns, and :data:`SIDE`.
    :raises KeyNotUnique: a result has a key twice.
    """
    names = table.schema.names
    held: pa.Table | None = None
    seq = 0
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        whole = rows if held is None else pa.concat_tables([held, rows])
        if not whole.num_rows:
            continue
        starts = _starts(whole, table.key_columns)
        done = int(starts[-1])
        held = whole.slice(done)
        if done:
            made = _changes(table, whole.slice(0, done), starts[:-1], names, epoch, seq)
            seq += made.num_rows
            yield made
        elif held.num_rows > 2:
            raise _not_unique(table)
    if held is not None and held.num_rows:
        yield _changes(table, held, np.zeros(1, np.int64), names, epoch, seq)


def logged(table: SourceTable, rows: pa.Table, ops: NDArray[np.int8], epoch: int, first_seq: int) -> pa.RecordBatch:
    """*rows* of *table* with the columns that its log adds."""
    count = rows.num_rows
    time = pa.scalar(time_us(epoch), pa.timestamp("us", tz="UTC"))
    columns: list[Any] = [_array(rows.column(name)).cast(table.column(name).type) for name in table.schema.names]
    columns += [
        pa.repeat(pa.scalar(position_of(epoch), POSITION), count),
        pa.repeat(time, count),
        pa.nulls(count, pa.string()),
        pa.array(ops, pa.int8()),
        pa.array(np.zeros(count, np.uint16)),
        pa.array(np.arange(first_seq, first_seq + count, dtype=np.uint32)),
        pa.array(np.full(count, epoch, np.uint64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=read_schema(table.log_schema(POSITION)))


def position_of(epoch: int) -> bytes:
    """The position of a derived row: its epoch."""
    return epoch.to_bytes(8, "big") + bytes(8)


def time_us(epoch: int) -> int:
    """When *epoch* was, in microseconds since 1970."""
    return ((epoch >> PHYSICAL_SHIFT) + ORIGIN_UNIX_MS) * 1000


def _starts(rows: pa.Table, key_columns: Sequence[str]) -> I64:
    """Where a row begins another key than the row before."""
    if rows.num_rows == 1:
        return np.zeros(1, np.int64)
    same = same_rows(rows.slice(0, rows.num_rows - 1), rows.slice(1), key_columns)
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(~same).astype(np.int64) + 1])


def _changes(
    table: SourceTable, rows: pa.Table, starts: I64, names: Sequence[str], epoch: int, seq: int
) -> pa.RecordBatch:
    sizes = np.diff(np.append(starts, rows.num_rows))
    sides = _array(rows.column(SIDE)).to_numpy()
    pairs = starts[sizes == 2]
    if (sizes > 2).any() or (sides[pairs] != OLD).any() or (sides[pairs + 1] != NEW).any():
        raise _not_unique(table)
    ops = np.where(sides == OLD, np.int8(Op.DELETE), np.int8(Op.INSERT))
    ops[pairs], ops[pairs + 1] = Op.UPDATE_DELETE, Op.UPDATE_INSERT
    stays = np.ones(rows.num_rows, np.bool_)
    if pairs.size:
        same = same_rows(rows.take(pa.array(pairs)), rows.take(pa.array(pairs + 1)), names)
        stays[pairs[same]] = stays[pairs[same] + 1] = False
    left = np.flatnonzero(stays)
    return logged(table, rows.take(pa.array(left)), ops[left], epoch, seq)


def _not_unique(table: SourceTable) -> KeyNotUnique:
    return KeyNotUnique(
        f"The function of {table.full_name} gave two rows with one value of {', '.join(table.key_columns)}.",
        next_step="Name the columns that make a row of its result unique in key, or group by them in the function.",
    )


def _array(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


_STAGED: Final = "staged"
_OLD_OPS: Final = (Op.DELETE, Op.UPDATE_DELETE)
_NEW_OPS: Final = (Op.INSERT, Op.UPDATE_INSERT)


class Rows(Enum):
    """Which rows of a table a frame has.

    ``ALL``: of the epoch. ``SCANNED``: those of the keys, found among all. ``FOUND``: those of the keys, looked up: the
    keys are the primary key. ``OLD``, ``NEW``: those that changed, as they were and as they are.
    """

    ALL = "all"
    SCANNED = "scanned"
    FOUND = "found"
    OLD = "old"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class TableFrame:
    """One table of a derivation at one epoch.

    :ivar read: what is read of it. :ivar schema: as the function sees it. :ivar cuts: of the vnodes, for tasks.
    :ivar by: the columns that it goes by, as the table has them at that epoch. :ivar keys: the values.
    """

    read: KeptRead
    schema: st.StructType
    cuts: tuple[int, ...]
    rows: Rows
    by: tuple[str, ...] = ()
    keys: pa.Table | None = None

    def frame(self, spark: SparkSession) -> DataFrame:
        """The DataFrame; nothing is read yet."""
        parts = 1 if self.rows is Rows.FOUND else len(self.cuts) - 1
        return spark.range(0, parts, 1, parts).mapInArrow(self._task(), self.schema)

    def _task(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        read = self.part

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            hot()
            try:
                for batch in batches:
                    for number in batch.column(0).to_pylist():
                        yield from read(number)
            except HeadwaterError as error:
                raise ToldError(Failure.of(error)) from error

        return task

    def part(self, number: int) -> Iterator[pa.RecordBatch]:
        """The rows of one part of the table."""
        return self.read.shaped(self._rows(number), Shape(self.schema))

    def _rows(self, number: int) -> Iterator[pa.RecordBatch]:
        if self.rows is Rows.FOUND:
            yield from self._looked_up()
            return
        vnodes = (self.cuts[number], self.cuts[number + 1])
        if self.rows is Rows.ALL:
            yield from self.read.batches(vnodes)
        elif self.rows is Rows.SCANNED:
            assert self.keys is not None
            kept = KeyFilter(self.keys, self.by)
            yield from (kept.rows(batch) for batch in self.read.batches(vnodes, self.by))
        else:
            ops = pa.array([int(op) for op in (_OLD_OPS if self.rows is Rows.OLD else _NEW_OPS)], pa.int8())
            for batch in self.read.batches(vnodes):
                yield batch.filter(pc.is_in(batch.column(OP), value_set=ops))

    def _looked_up(self) -> Iterator[pa.RecordBatch]:
        assert self.keys is not None
        with closing(self.read.place.open()) as table:
            known = table.table(self.read.epoch)
            names = [name for name in self.read.places if name is not None] or list(known.key_columns)
            wanted = self.keys.rename_columns(list(self.by)).select(list(known.key_columns))
            wanted = _fitting(wanted, pa.schema([known.schema.field(name) for name in known.key_columns]))
            found = table.lookup(wanted, self.read.epoch, columns=names)
        yield from found.combine_chunks().to_batches()


def _fitting(keys: pa.Table, schema: pa.Schema) -> pa.Table:
    """*keys*, which have the widest types of all tables, in those of one: no row has what does not fit there."""
    cast = keys.cast(schema, safe=False)
    for name in schema.names:
        if keys.column(name).type != cast.column(name).type:
            fits = pc.equal(cast.column(name).cast(keys.column(name).type, safe=False), keys.column(name))
            keys, cast = keys.filter(fits), cast.filter(fits)
    return cast


@dataclass(frozen=True, slots=True)
class Staging:
    """How the rows of a result are staged; it can be pickled."""

    sink: Sink
    table: SourceTable
    token: Token

    def first(self, result: DataFrame, parts: int) -> list[Staged]:
        """A whole result, as history."""
        return self._staged(self._sided(result, NEW), parts, _stage_history)

    def following(self, old: DataFrame, new: DataFrame, parts: int) -> list[Staged]:
        """What makes the *old* result the *new* one, as changes."""
        return self._staged(self._sided(old, OLD).unionAll(self._sided(new, NEW)), parts, _stage_changes)

    def emptied(self) -> Staged:
        """That what the sink had of the table is void."""
        return self.sink.stage_changes(self.table, self.token, iter(()), (self.token.epoch, 0))

    def _sided(self, result: DataFrame, side: int) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        names = [F.col(_quoted(name)) for name in self.table.schema.names]
        return result.select(*names, F.lit(side).alias(SIDE))

    def _staged(
        self, sided: DataFrame, parts: int, stage: Callable[[Staging, Iterator[pa.RecordBatch]], Staged]
    ) -> list[Staged]:
        key = [_quoted(name) for name in self.table.key_columns]
        ordered = sided.repartition(parts, *key).sortWithinPartitions(*key, SIDE)
        made = replace(self)

        @told
        def staged(batches: Iterator[pa.RecordBatch]) -> bytes:
            hot()
            return pickle.dumps(stage(made, batches))

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({_STAGED: pa.array([staged(batches)], pa.binary())})

        rows = ordered.mapInArrow(task, f"{_STAGED} BINARY").collect()
        return [pickle.loads(row[_STAGED]) for row in rows]


def _stage_history(staging: Staging, batches: Iterator[pa.RecordBatch]) -> Staged:
    epoch = staging.token.epoch
    part = HistoryPart(SplitKind.KEY, (KeyRange(),), position_of(epoch), time_us(epoch))
    names = staging.table.schema.names
    rows = (batch.select(names) for batch in differences(staging.table, batches, epoch))
    return staging.sink.stage_history(staging.table, staging.token, part, rows)


def _stage_changes(staging: Staging, batches: Iterator[pa.RecordBatch]) -> Staged:
    changes = differences(staging.table, batches, staging.token.epoch)
    return staging.sink.stage_changes(staging.table, staging.token, changes, None)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def result_columns(result: Any) -> tuple[tuple[str, ...], tuple[pa.DataType, ...], tuple[str, ...]]:
    """Of a DataFrame: names, types in Arrow, and types as Spark writes them."""
    from headwater.spark.types import arrow_schema

    schema: st.StructType = result.schema
    fields: Sequence[st.StructField] = schema.fields
    types = tuple(arrow_schema(schema).types)
    return tuple(schema.names), types, tuple(field.dataType.simpleString() for field in fields)
