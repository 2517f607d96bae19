"""A kept table as a batch: as of an epoch, or what changed between two, one record for each key. No database is asked.

The columns are the table's own, and of changes ``_change_type``: an old row of an update comes right before its new
one. Vnode ranges are the partitions. The epoch is chosen once for a DataFrame, and pinned while it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from headwater.log_store import LogView
from headwater.log_store.columns import OP
from headwater.spark.columns import ADDED, CHANGE_TYPE_COLUMN, ON_DEMAND, Columns, discovered
from headwater.spark.data_source_api import DataSourceReader, InputPartition
from headwater.spark.errors import InvalidOption, UnsupportedSchema
from headwater.spark.kept_rows import KeptPlace, KeptRead, vnode_cuts
from headwater.spark.options import ALL_COLUMNS, NEWEST, STOP, SourceOptions
from headwater.spark.session import hot
from headwater.spark.snapshot_keeper import KeptFrame, keep
from headwater.spark.types import Shape
from headwater.state import open_reader
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT
from headwater.stream.op import Op
from headwater.versioned import BaseGone, TableNotKept, VersionedTable
from headwater.versioned.folder import TableFolder

_OWNER: Final = "spark read"


@dataclass(frozen=True, slots=True)
class PinnedMoment:
    """One epoch of a kept table, for all actions."""

    kind: ClassVar[str] = "pinned"

    place: KeptPlace
    epoch: int
    fixed: bool = True

    def open(self) -> tuple[Callable[[], None], dict[str, Any]]:
        """:raises BaseGone: the epoch is folded."""
        with closing(self.place.open()) as table:
            return table.pin(_OWNER, self.epoch).release, {}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PinnedMoment:
        return cls(KeptPlace(**fields["place"]), fields["epoch"])


@dataclass(frozen=True, slots=True)
class KeptPartition(InputPartition):
    """Some vnodes of a kept table."""

    number: int
    read: KeptRead
    vnodes: tuple[int, int]
    frame: KeptFrame


class KeptReader(DataSourceReader):
    """The rows as of ``asOfEpoch``, or the net changes of ``(startEpoch, endEpoch]``."""

    def __init__(self, options: SourceOptions, schema: st.StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """:raises BaseGone: the epoch is folded. :raises NotYet: it is not sealed. :raises NotComplete: no history."""
        options = self._options
        place = kept_place(options)
        with ExitStack() as pinned:
            with closing(place.open()) as table:
                after, epoch = _epochs(options, table)
                pin = pinned.enter_context(table.pin(_OWNER, epoch if after is None else after))
                epoch = epoch or pin.epoch
                there = table.table(epoch)
                columns = Columns.of(self._schema, there, _wanted(options))
                places = columns.places(there, stops=options.on_schema_change == STOP)
                cuts = vnode_cuts(table, epoch, options.parallelism)
            # the store is closed: a keeper that is a copy of this process could not open it otherwise
            frame = keep(PinnedMoment(place, pin.epoch), len(cuts) - 1, options.snapshot_seconds)
        read = KeptRead(place, epoch, places, after)
        return [KeptPartition(number, read, part, frame) for number, part in enumerate(pairwise(cuts))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        assert isinstance(partition, KeptPartition)
        return partition.read.shaped(self._rows_of(partition), Shape(self._schema))

    def _rows_of(self, partition: KeptPartition) -> Iterator[pa.RecordBatch]:
        with partition.frame.reading(partition.number):
            rows = partition.read.batches(partition.vnodes)
            if partition.read.after is not None and not self._options.preimages:
                rows = map(_without_preimages, rows)
            yield from rows


def kept_schema(options: SourceOptions) -> st.StructType:
    """The columns of a kept table, as of the epoch that is asked for."""
    with closing(kept_place(options).open()) as table:
        _, epoch = _epochs(options, table)
        return discovered(table.table(epoch or table.newest_epoch), _wanted(options))


def kept_place(options: SourceOptions) -> KeptPlace:
    """Where the table is. :raises InvalidOption: nobody told. :raises TableNotKept: it is not there."""
    if not options.tables:
        raise InvalidOption(
            f"The store at {options.store} is no folder: where its kept tables are is not known.",
            next_step="Set option 'tables' to the folder of the sink of kind 'table'.",
        )
    names = (options.table, f"public.{options.table}")
    known = next((name for name in names if TableFolder(options.tables, name).newest().number), None)
    if known is None:
        raise TableNotKept(
            f"The table {options.table} is not kept in {options.tables}.",
            next_step="Add a sink with kind = \"table\" to the pipeline, and run it; or set option 'tables'.",
        )
    return KeptPlace(options.store, options.tables, known)


def _epochs(options: SourceOptions, table: VersionedTable) -> tuple[int | None, int | None]:
    """After which epoch, and up to which; ``None`` where it is the newest."""
    if options.as_of_ms is not None:
        return None, _epoch_at(options, table)
    if options.as_of is not None:
        return None, None if options.as_of == NEWEST else options.as_of
    return options.start_epoch, table.newest_epoch if options.end_epoch is None else options.end_epoch


def _epoch_at(options: SourceOptions, table: VersionedTable) -> int:
    """The newest epoch that was sealed at the time that is asked for.

    :raises BaseGone: that was before the base.
    """
    assert options.as_of_ms is not None
    base = table.base_epoch
    with open_reader(options.store) as reader, reader.snapshot() as view:
        ends = LogView.open(view, table.name).epochs(base)
        found = max((int(end.epoch) for end in ends if end.sealed_ms <= options.as_of_ms), default=base)
    if found == base and options.as_of_ms < (base >> PHYSICAL_SHIFT) + ORIGIN_UNIX_MS:
        raise BaseGone(
            f"The kept table {table.name} is folded up to epoch {base}, which is later than that time.",
            base,
            next_step=f"Read epoch {base} or a later one.",
        )
    return found


def _wanted(options: SourceOptions) -> tuple[str, ...]:
    added = (CHANGE_TYPE_COLUMN,) if options.net else ()
    wanted = options.columns or (ALL_COLUMNS, *added)
    strange = next((name for name in wanted if name in (*ADDED, *ON_DEMAND) and name not in added), None)
    if strange is not None:
        raise UnsupportedSchema(
            f"A kept table has no column {strange!r}.",
            next_step="Leave it out, or read the changes from the log: startEpoch without net.",
        )
    return wanted


def _without_preimages(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.not_equal(batch.column(OP), pa.scalar(Op.UPDATE_DELETE.value, pa.int8())))
