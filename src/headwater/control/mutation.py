"""What the barrier carries that a query applies a request with."""

from __future__ import annotations

from headwater.control.command import (
    PauseBackfill,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ThrottleBackfill,
)
from headwater.stream.mutation import ALL_TARGETS, Mutation, Pause, Resnapshot, Resume, Throttle


def mutation_of(command: QueryCommand, table: str | None = None) -> Mutation:
    """The mutation for *table*; ``None``: for all tables of the query.

    :raises BarrierError: values that contradict each other.
    """
    target = ALL_TARGETS if table is None else table
    match command:
        case PauseBackfill():
            return Pause(target)
        case ResumeBackfill():
            return Resume(target)
        case ThrottleBackfill(rows_per_second=rate):
            return Throttle(rate, target)
        case ResnapshotTable(start=start, end=end, columns=columns):
            return Resnapshot(target, start, end, columns)
