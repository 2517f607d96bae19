"""UpstreamDelivery: an upstream table that a delivery loop brings to a sink, its snapshot as history, its change log as
changes. A batch is a plan, and the sink keeps the plan's name with its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.backfill.claims import Budget, Claim, StagedClaims
from headwater.backfill.snapshot.consume_upstream.planner import Recover, UpstreamPlanner
from headwater.backfill.snapshot.consume_upstream.query import UpstreamQuery, UpstreamUnit
from headwater.backfill.snapshot.consume_upstream.reader import read_unit
from headwater.backfill.snapshot.consume_upstream.upstream_table import PartKind
from headwater.backfill.tasks import Slots
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import SplitKind
from headwater.sources.written import POSITION_DTYPE
from headwater.system.clock import Clock


@dataclass(frozen=True, slots=True)
class UpstreamDelivery:
    """The table of one query, and the sink that gets it. Its rows are never parked: it has one table."""

    query: UpstreamQuery
    sink: Sink
    parks_rows = False
    may_park = ()

    @property
    def name(self) -> str:
        return self.query.query

    @property
    def store(self) -> str:
        return self.query.store

    @property
    def state(self) -> str:
        return self.query.state_location

    def open_planner(
        self, recover: Recover, parked: Callable[[], Mapping[str, str]], slots: Slots, clock: Clock
    ) -> UpstreamPlanner:
        """The planner of its batches. An earlier one is fenced."""
        return UpstreamPlanner(self.query, recover=recover, takeover=True, slots=slots, clock=clock)

    def stage(self, claims: Sequence[Claim], budget: Budget | None = None) -> StagedClaims:
        """See :meth:`headwater.backfill.claims.Delivery.stage`."""
        return StagedClaims([staged for claim in claims for staged in self._stage(claim.unit, claim.token, budget)])

    def commit_parked(self, parked: Sequence[Staged]) -> None:
        """There are none."""

    def _stage(self, unit: UpstreamUnit, token: Token, budget: Budget | None) -> list[Staged]:
        """What came before a new snapshot goes with its first batch."""
        sink, rows = self.sink, read_unit(self.query.upstream, unit)
        if budget is not None:
            rows = budget.through(rows)
        truncated = (token.epoch, 0) if unit.replaces else None
        if unit.part.kind is PartKind.CHANGES:
            return [sink.stage_changes(unit.table, token, rows, truncated)]
        own = (batch.select(unit.table.schema.names) for batch in rows)
        part = HistoryPart(SplitKind.KEY, (), _position(unit), unit.commit_time_us)
        staged = [sink.stage_history(unit.table, token, part, own)]
        if truncated is not None:
            staged.append(sink.stage_changes(unit.table, token, iter(()), truncated))
        return staged


def _position(unit: UpstreamUnit) -> bytes:
    """Before every row of a later version."""
    position = np.zeros(1, POSITION_DTYPE)
    position["epoch"] = unit.commit_version
    return position.tobytes()
