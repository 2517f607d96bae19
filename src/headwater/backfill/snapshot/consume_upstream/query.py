"""UpstreamQuery: everything that a query over an upstream table is made of; and the units that its tasks read.

It travels to tasks: values only, and a table that holds no connection.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamOptions
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, UpstreamTable
from headwater.backfill.tasks import Slots, tasks_of
from headwater.sources.table import SourceTable
from headwater.state.query_store import own_state


@dataclass(frozen=True, slots=True)
class UpstreamQuery:
    """One query.

    :ivar upstream: the table that it consumes.
    :ivar store: where its state is kept, beside (``queries/<query>``); nothing else needs to be there.
    :ivar query: its name.
    :ivar since: an epoch: no snapshot is read, only what changed after it.
    :ivar since_ms: the same by the time since 1970: from the first epoch that is not before it.
    :ivar parallelism: how many tasks of a stream run side by side.
    :raises InvalidQuery: no name, or a number that makes no sense.
    """

    upstream: UpstreamTable
    store: str
    query: str
    since: int | None = None
    since_ms: int | None = None
    parallelism: int = 2
    options: UpstreamOptions = field(default_factory=UpstreamOptions)

    def __post_init__(self) -> None:
        if not self.query or not self.store:
            raise InvalidQuery("A query needs a name, and a place for its state.")
        if self.parallelism < 1:
            raise InvalidQuery(f"Received parallelism={self.parallelism}; valid are numbers from 1.")
        if self.since is not None and self.since_ms is not None:
            raise InvalidQuery("Begin at an epoch or at a time, not at both.")

    @property
    def state_location(self) -> str:
        """Where its state is."""
        return own_state(self.store, self.query)

    @property
    def resnapshot(self) -> str:
        """The command that reads the table once more."""
        return f"headwater resnapshot --store {shlex.quote(self.store)} --query {shlex.quote(self.query)}"

    @property
    def advice(self) -> str:
        """What to do when the table has forgotten what comes next."""
        return f"Read the table once more: {self.resnapshot}"


@dataclass(frozen=True, slots=True)
class UpstreamUnit:
    """What one task reads.

    :ivar table: as it is at the end of the part. :ivar plan: the number of the plan.
    :ivar epoch: of the plan, in the order of plans: what sinks know the batch by.
    :ivar replaces: the table is read once more: what came before this plan is void.
    :ivar commit_version: of the part's last epoch, as the table calls it. :ivar commit_time_us: when that was.
    """

    table: SourceTable
    part: Part
    plan: int
    epoch: int
    replaces: bool
    commit_version: int
    commit_time_us: int

    @property
    def rows(self) -> int:
        """About how many it reads."""
        return self.part.rows


def cut_parts(parts: Sequence[Part], slots: Slots) -> Iterator[Part]:
    """The same, cut where they are large, or of unknown size, and have more than one vnode."""
    for part in parts:
        vnodes = part.end_vnode - part.first_vnode
        pieces = min(tasks_of(part.rows, 0, slots) if part.rows else slots(), vnodes)
        cuts = [part.first_vnode + vnodes * piece // pieces for piece in range(pieces + 1)]
        for first, end in pairwise(cuts):
            yield replace(part, first_vnode=first, end_vnode=end, rows=part.rows // pieces)
