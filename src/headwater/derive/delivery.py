"""DerivedDelivery: a derived table, and the sink that a delivery loop brings it to. A batch is staged in the driver: it
calls the function, and Spark's tasks read its tables and stage the difference that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headwater import failpoints
from headwater.backfill.claims import Budget, Claim, StagedClaims
from headwater.backfill.planner import Recover
from headwater.backfill.tasks import Slots
from headwater.derive.affected import AffectedKeys
from headwater.derive.derivation import NAMESPACE, Derivation, ResultColumns
from headwater.derive.frames import Rows, Staging, TableFrame, result_columns
from headwater.derive.planner import MANY_KEYS, DerivedPlanner, DerivedUnit, is_transform
from headwater.sinks.sink import Committed, Sink, Staged, Token
from headwater.sources.table import SourceTable
from headwater.spark.kept_rows import KeptPlace, KeptRead, places_of, vnode_cuts
from headwater.spark.types import spark_schema
from headwater.system.clock import Clock
from headwater.versioned import VersionedTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEFORE_STAGE = failpoints.register("derive.before_stage")
AFTER_STAGE = failpoints.register("derive.after_stage")

FEW_KEYS: Final = 2_000
"""Up to so many keys are looked up where they are the primary key; above, all rows are read."""


@dataclass(frozen=True, slots=True)
class DerivedDelivery:
    """One derived table.

    :ivar name: of its query. :ivar store: of the logs. :ivar state: the store of its state.
    :ivar folder: of the kept tables. :ivar spark: gives the session. :ivar note: writes an entry of the journal.
    :ivar interval_seconds: from the end of one batch to the next look for changes.
    """

    name: str
    store: str
    state: str
    folder: str
    derivation: Derivation
    function: Callable[..., DataFrame]
    sink: Sink
    spark: Callable[[], SparkSession]
    note: Callable[[str, dict[str, Any]], None]
    interval_seconds: float = 0.0
    parks_rows = False
    may_park = ()

    def open_planner(
        self, recover: Recover, parked: Callable[[], Mapping[str, str]], slots: Slots, clock: Clock
    ) -> DerivedPlanner:
        """The planner of its batches. An earlier one is fenced."""
        return DerivedPlanner(self, recover, slots, clock)

    def commit_parked(self, parked: Sequence[Staged]) -> None:
        """There are none."""

    @contextmanager
    def opened(self) -> Iterator[list[VersionedTable]]:
        """Its kept tables. :raises TableNotKept: one is not kept. :raises NotComplete: its history is being read."""
        with ExitStack() as stack:
            places = [KeptPlace(self.store, self.folder, name) for name in self.derivation.tables]
            yield [stack.enter_context(closing(place.open())) for place in places]

    def stage(self, claims: Sequence[Claim], budget: Budget | None = None) -> StagedClaims:
        """Stage what makes the table in the sink the result as of the epoch of its one claim; in the driver, once.

        :raises InvalidDerivation: the result cannot be a table. :raises ResultChanged: it has other columns now.
        """
        (claim,) = claims
        unit: DerivedUnit = claim.unit
        with self.opened() as tables:
            known = [table.table(unit.epoch) for table in tables]
            frames = partial(self._frames, self.spark(), tables, known, unit.slots())
            if unit.affected is None:
                staged = self._first(unit, claim.token, frames)
            else:
                staged = self._following(unit, claim.token, frames, is_transform(self.derivation, known))
        unit.rows = sum(part.rows for part in staged)
        failpoints.hit(AFTER_STAGE)
        return StagedClaims(staged)

    def _first(self, unit: DerivedUnit, token: Token, frames: Callable[..., list[DataFrame]]) -> list[Staged]:
        result = self.function(*frames(unit.epoch, Rows.ALL))
        table = ResultColumns(*result_columns(result)).table(self.derivation, None)
        unit.state.put(unit.state.record.begun(table, unit.epoch, unit.made_by))
        if token.generation > 1:  # what a life before has under way, no token of this one accounts for
            self.sink.fence(table, self.name, token.generation)
        self.sink.abort(table, self.name, token.generation)  # what a life before left
        staging = Staging(self.sink, table, token)
        failpoints.hit(BEFORE_STAGE)
        staged = staging.first(result, unit.slots())
        if self.sink.committed(table, self.name, token.backfill) != Committed():
            staged.append(staging.emptied())  # of a life before: what it left there is void
        return staged

    def _following(
        self, unit: DerivedUnit, token: Token, frames: Callable[..., list[DataFrame]], is_of_rows: bool
    ) -> list[Staged]:
        """The difference of the results of the keys, as they were and as they are."""
        if is_of_rows:
            sides = frames(unit.epoch, Rows.OLD, unit.before), frames(unit.epoch, Rows.NEW, unit.before)
        else:
            assert unit.affected is not None
            keys = unit.affected if unit.affected.count <= MANY_KEYS else None
            rows = Rows.ALL if keys is None else Rows.SCANNED
            sides = frames(unit.before, rows, keys=keys), frames(unit.epoch, rows, keys=keys)
        old, new = (self.function(*side) for side in sides)
        before = unit.state.record.table(NAMESPACE, self.derivation.name)
        table = ResultColumns(*result_columns(new)).table(self.derivation, before)
        failpoints.hit(BEFORE_STAGE)
        return Staging(self.sink, table, token).following(old, new, unit.slots())

    def _frames(
        self,
        spark: SparkSession,
        tables: Sequence[VersionedTable],
        known: Sequence[SourceTable],
        slots: int,
        epoch: int,
        rows: Rows,
        after: int | None = None,
        keys: AffectedKeys | None = None,
    ) -> list[DataFrame]:
        """A frame of each table at *epoch*, with the columns of *known*."""
        frames = []
        for table, wanted, by in zip(tables, known, self.derivation.by, strict=True):
            there = table.table(epoch)
            places = places_of(wanted, there)
            by_name = dict(zip(wanted.schema.names, places, strict=True))
            columns = tuple(by_name[name] for name in by)
            how = rows
            if rows is Rows.SCANNED and keys is not None:
                is_key = set(columns) == set(there.key_columns) and keys.count <= FEW_KEYS
                how = Rows.FOUND if is_key else rows
            frame = TableFrame(
                KeptRead(KeptPlace(self.store, self.folder, there.full_name), epoch, places, after),
                spark_schema(wanted),
                tuple(vnode_cuts(table, epoch, slots)),
                how,
                tuple(name for name in columns if name is not None),
                None if keys is None else keys.keys,
            )
            frames.append(frame.frame(spark))
        return frames
