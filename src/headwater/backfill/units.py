"""Units: what one task reads. A unit is planned on the driver and can be read anywhere; it depends on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind
from headwater.backfill.snapshot.parts import VnodeFilter, VnodePart
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotMark, mark_from_json
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.sources.written import POSITION_DTYPE


class Rule(Enum):
    """What happens to the changes of a part of the keys.

    ``DROP``: its rows were not read yet, and will have the change. ``EMIT``: they were read, and the log has passed all
    that they had. ``SINCE``: they were read in a snapshot; what that does not contain is emitted.
    """

    DROP = "drop"
    EMIT = "emit"
    SINCE = "since"


@dataclass(frozen=True, slots=True)
class Run:
    """The rule for the keys from where the run before it ends up to *end*.

    :ivar mark: with ``SINCE``: the number of the mark in its filter.
    """

    end: Cut | None
    rule: Rule
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeFilter:
    """Which changes of a table that is being backfilled are emitted.

    :ivar runs: in key order; the last has no end. With ``HEAP`` there is one, for all keys.
    """

    kind: SplitKind
    runs: tuple[Run, ...]
    marks: tuple[SnapshotMark, ...] = ()

    def to_json(self) -> dict[str, Any]:
        runs = [[run.end and run.end.to_json(), run.rule.value, run.mark] for run in self.runs]
        return {"kind": self.kind.value, "runs": runs, "marks": [mark.to_json() for mark in self.marks]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChangeFilter:
        runs = tuple(
            Run(None if end is None else Cut.from_json(end), Rule(rule), mark) for end, rule, mark in value["runs"]
        )
        return cls(SplitKind(value["kind"]), runs, tuple(mark_from_json(text) for text in value["marks"]))


DROP_ALL = ChangeFilter(SplitKind.KEY, (Run(None, Rule.DROP),))


@dataclass(frozen=True, slots=True)
class LogUnit:
    """Rows of a table's log: the epochs in ``(after, upto]``, the vnodes in ``[first_vnode, end_vnode)``.

    :ivar table: as its log has it at the end of *upto*.
    :ivar filter: while the table is backfilled; ``None`` emits everything.
    :ivar truncated: epoch and seq of the last TRUNCATE in the range: rows before it are void.
    :ivar plan: the newest plan whose rows the reader of this unit has seen or is about to see.
    :ivar rows: about how many. :ivar size: about how many bytes the log stores for them.
    """

    table: SourceTable
    after: int
    upto: int
    first_vnode: int
    end_vnode: int
    plan: int
    filter: ChangeFilter | VnodeFilter | None = None
    truncated: tuple[int, int] | None = None
    rows: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class SplitUnit:
    """Rows of history: ranges of a table, read inside one exported snapshot.

    :ivar plan: the number of the plan that handed it out. :ivar attempt: counts the snapshots taken for that plan.
    :ivar upto: the newest epoch of the log that the snapshot has as a whole.
    :ivar position: the ``_position`` of its rows: after every change up to *upto*, before every later one.
    :ivar commit_time_us: the time of *upto*'s last commit, which its rows get.
    :ivar changed_since: with ``HEAP``: changes after this epoch may have brought a row already, or another version of
        one that was read before. :ivar until: the place in the log before which lie all that the snapshot shows.
    :ivar replaces: the range may hold rows at the target already (a new snapshot of a part): they go.
    :ivar rereads: the target was given rows of the table before.
    """

    table: SourceTable
    kind: SplitKind
    ranges: tuple[KeyRange, ...]
    snapshot: str
    plan: int
    attempt: int
    upto: int
    position: bytes
    commit_time_us: int
    rows: int
    columns: tuple[str, ...] | None = None
    changed_since: int | None = None
    until: CdcOffset | None = None
    replaces: bool = False
    rereads: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotUnit:
    """Rows of history: parts of a table that we keep, as they are at *epoch*, which is pinned.

    :ivar table: as it is at *epoch*. The others are those of a :class:`SplitUnit`.
    """

    table: SourceTable
    epoch: int
    parts: tuple[VnodePart, ...]
    plan: int
    attempt: int
    position: bytes
    commit_time_us: int
    rows: int
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class UpstreamUnit:
    """Rows of an upstream table: of its snapshot, or of its change log.

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

    @property
    def is_history(self) -> bool:
        """Whether its rows are of the snapshot."""
        return self.part.kind is PartKind.SNAPSHOT

    @property
    def position(self) -> bytes:
        """The ``_position`` of rows of the snapshot: before every row of a later version."""
        position = np.zeros(1, POSITION_DTYPE)
        position["epoch"] = self.commit_version
        return position.tobytes()

    @property
    def truncated(self) -> tuple[int, int] | None:
        """Epoch and seq before which all rows of the table are void; ``None``: none are."""
        return (self.epoch, 0) if self.replaces else None


Unit: TypeAlias = LogUnit | SplitUnit | SnapshotUnit | UpstreamUnit


def covered(ranges: Sequence[KeyRange]) -> list[KeyRange]:
    """Neighbouring *ranges*, in order, as one where they touch."""
    made: list[KeyRange] = []
    for part in ranges:
        if made and made[-1].end is not None and made[-1].end == part.start:
            made[-1] = KeyRange(made[-1].start, part.end)
        else:
            made.append(part)
    return made
