"""TableBackfill: the rows that a table of a query had before its log begins, delivered beside the log.

============================  ======================================================================================
implementation                where the rows come from
============================  ======================================================================================
``NoBackfill``                nowhere: the log alone is delivered
``CdcBackfill``               the source database, inside snapshots that it exports
``SnapshotBackfill``          our own versioned table, as it is at an epoch
============================  ======================================================================================

The calls of one batch, in this order: ``observe`` its changes, ``settle`` where nothing is left of the log, hand out (a
``CdcBackfill`` inside a snapshot of the source, a ``SnapshotBackfill`` at the epoch where the batch ends), ``save``,
``filter`` for its changes; then either ``deliver``, once it is at the sink, or ``roll_back``. ``observe``, ``settle``,
``restart`` and ``renew`` return the backfill that goes on from there: the same one, or the one that takes over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headwater.backfill.cdc.state import Renewal
from headwater.backfill.log_ranges import TableChanges
from headwater.backfill.plans import QueryState, TableRecord
from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.parts import VnodeFilter
from headwater.backfill.units import ChangeFilter
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotSource
from headwater.sources.table import SourceTable
from headwater.state import WriteBatch
from headwater.stream import Barrier
from headwater.system.clock import Clock


@dataclass(slots=True)
class TableContext:
    """What a table of a query and its backfill share.

    :ivar table: as its log has it where the next batch ends.
    """

    options: QueryOptions
    state: QueryState
    source: SnapshotSource
    clock: Clock
    table: SourceTable

    @property
    def name(self) -> str:
        return self.table.full_name

    @property
    def record(self) -> TableRecord:
        """What the query knows of the table; :meth:`put` it after a change."""
        return self.state.table(self.name)

    def put(self) -> None:
        """Write the record with the next save."""
        self.state.put_table(self.name)


class TableBackfill(Protocol):
    """The backfill of one table. What changes is written with the next save of the query's state."""

    @property
    def is_external(self) -> bool:
        """Whether rows are read from the source, also those of a table that was emptied."""

    @property
    def is_reading(self) -> bool:
        """Whether rows are left to be handed out."""

    @property
    def is_held(self) -> bool:
        """Whether it does not go on by itself: paused, throttled to zero, or its capture has stopped."""

    @property
    def is_done(self) -> bool:
        """Whether its rows are read, and the log has passed them."""

    @property
    def has_read(self) -> bool:
        """Whether rows were handed out."""

    @property
    def replaces(self) -> bool:
        """Whether the sink may have the rows already."""

    def on_barrier(self, barrier: Barrier) -> None:
        """Follow what *barrier* carries."""

    def observe(self, changes: TableChanges, began: str | None, *, is_recaptured: bool) -> TableBackfill:
        """The next batch has *changes*, and the context their table.

        :param began: where the log begins; ``None``: unknown. :param is_recaptured: it begins again after a gap.
        """

    def settle(self, position: CdcOffset, epoch: int) -> TableBackfill:
        """All batches from now on begin after *epoch*, at *position* of the source's log or later."""

    def deliver(self, plan: int, epoch: int) -> None:
        """What plans up to *plan* handed out, and changes up to *epoch*, are at the sink."""

    def roll_back(self, plan: int, epoch: int | None) -> None:
        """Nothing was handed out by plans after *plan*; delivered is what the epochs up to *epoch* have."""

    def restart(self) -> TableBackfill:
        """The sink has no row of the table: everything is read again."""

    def renew(self, renewal: Renewal) -> TableBackfill:
        """Read the table, or a part of it, once more: from the source, after what is being read."""

    def filter(self, plan: int) -> ChangeFilter | VnodeFilter | None:
        """Which changes of the batch of *plan* are delivered; ``None``: all."""

    def save(self, batch: WriteBatch) -> None:
        """Write what has changed."""

    def status(self) -> dict[str, Any]:
        """How far it is, for people."""
