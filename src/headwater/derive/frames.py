"""Frames: the tables of a derivation as DataFrames at an epoch, whole or only the rows of some keys; and its result,
staged by tasks.

Rows are read and staged where tasks run, in Arrow batches; what comes back to the driver is what was staged.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from headwater.derive.affected import KeyFilter
from headwater.derive.difference import NEW, OLD, SIDE, differences, position_of, time_us
from headwater.errors import HeadwaterError
from headwater.log_store.columns import OP
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.spark.failure import Failure, ToldError, told
from headwater.spark.kept_rows import KeptRead
from headwater.spark.session import hot
from headwater.spark.types import Shape
from headwater.stream.op import Op

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
