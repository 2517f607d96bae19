"""UpstreamTable: what a table must be able to do to be consumed; and :class:`Part`, what is read of it at a time.

A table has rows in vnodes, a history of epochs, and for each epoch the changes that made it of the one before.

=========================  ========================================================================================
method                     contract
=========================  ========================================================================================
``newest_epoch``           the newest that is committed
``next_epoch``             an epoch after the given one and not after *upto*; ``None``: not committed yet. A table whose
                           change log is net over any range may skip epochs
``check_snapshot``         :class:`RetentionMiss` where the rows of an epoch are no longer kept
``snapshot_cuts``          where the rows of a vnode can be parted, so that parts are read by themselves
``change_cuts``            the same for the changes of epochs; raises :class:`RetentionMiss` where they are not kept
``snapshot``               the rows of vnodes at an epoch, from an **inclusive** position; in key order inside a vnode
                           if the table has cuts
``change_log``             for each key its changes after an epoch, in the order of epochs: an insert, a delete, or an
                           update pair for each epoch, or for all of them
``hold``                   keep an epoch and all that follow readable, where the table can
=========================  ========================================================================================

==================================  =================================================================================
name                                table
==================================  =================================================================================
``delta:PATH``, ``delta:s3://…``    a Delta table, with the columns of its key
``table:NAME``                      a table that we keep ourselves, with the store of its log and its folder
==================================  =================================================================================

A position is the memcomparable bytes of a key. Tables travel to tasks: they can be pickled and hold no connection then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream
from headwater.sources.table import SourceTable
from headwater.stream import DEFAULT_VNODE_COUNT

DELTA, KEPT = "delta", "table"
_VALID: Final = "Valid are delta:PATH and table:NAME."

VnodeRange = tuple[int, int]
"""Half-open."""


class PartKind(StrEnum):
    SNAPSHOT = "snapshot"
    CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of *vnode* from *start* up to its next cut are read by themselves.

    :ivar start: ``None``: from the beginning of the vnode. :ivar rows: about so many.
    """

    vnode: int
    start: bytes | None
    rows: int

    @property
    def first(self) -> bytes:
        """See :class:`~headwater.backfill.snapshot.parts.Block`."""
        return self.start or b""

    bytes = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What is read at a time: rows of some vnodes at *epoch*, or their changes after *after* up to it.

    :ivar first_vnode: and those up to *end_vnode*, which is not of it; one vnode where it has a *start* or *end*.
    :ivar start: the first key. :ivar end: the first key that is not of it.
    :ivar rows: about so many.
    """

    kind: PartKind
    after: int
    epoch: int
    first_vnode: int
    end_vnode: int
    start: bytes | None = None
    end: bytes | None = None
    rows: int = 0

    @property
    def vnodes(self) -> VnodeRange:
        return self.first_vnode, self.end_vnode

    @property
    def is_whole(self) -> bool:
        """Whether its vnodes are read from their beginning to their end."""
        return self.start is None and self.end is None

    def to_json(self) -> list[Any]:
        ends = [None if end is None else end.hex() for end in (self.start, self.end)]
        return [self.kind.value, self.after, self.epoch, self.first_vnode, self.end_vnode, *ends, self.rows]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Part:
        kind, after, epoch, first, end, start, stop, rows = value
        ends = [None if text is None else bytes.fromhex(text) for text in (start, stop)]
        return cls(PartKind(kind), after, epoch, first, end, ends[0], ends[1], rows)


class UpstreamTable(Protocol):
    """One table that is consumed."""

    @property
    def name(self) -> str:
        """How it is named to open it again, without secrets."""
        ...

    @property
    def identity(self) -> str:
        """The same for as long as it is the same table; one made anew in its place has another.

        :raises UpstreamDropped: it is gone.
        """
        ...

    @property
    def vnode_count(self) -> int: ...

    def table(self, epoch: int) -> SourceTable:
        """Its columns and key at *epoch*. :raises RetentionMiss: they are no longer known."""
        ...

    def newest_epoch(self) -> int:
        """The newest that is committed. :raises UpstreamDropped: it is gone."""
        ...

    def next_epoch(self, after: int, upto: int | None = None) -> int | None:
        """See above. :raises RetentionMiss: what follows *after* is gone. :raises UpstreamDropped: the table is."""
        ...

    def wait_for_epoch(self, after: int, timeout: float) -> None:
        """Wait until there may be an epoch after *after*, or for *timeout* seconds."""
        ...

    def commit_version(self, epoch: int) -> int:
        """What the table itself calls *epoch*."""
        ...

    def epoch_of_version(self, version: int) -> int:
        """The inverse of :meth:`commit_version`."""
        ...

    def commit_time_us(self, epoch: int) -> int:
        """When *epoch* was committed."""
        ...

    def epoch_at(self, time_ms: int) -> int | None:
        """The epoch after which comes all that was committed at *time_ms* since 1970 or later; ``None``: nothing yet.

        :raises RetentionMiss: that is no longer known.
        """
        ...

    def check_changes(self, after: int) -> None:
        """:raises InvalidUpstream: it writes no changes from *after* on. :raises RetentionMiss: nobody can tell."""
        ...

    def check_snapshot(self, epoch: int) -> None:
        """:raises RetentionMiss: the rows of *epoch* are no longer kept."""
        ...

    def snapshot_cuts(self, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        """Cuts by vnode and start. A vnode that has none, or none at its beginning, has rows all the same, maybe."""
        ...

    def change_cuts(self, after: int, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        """The same for the changes. :raises RetentionMiss: they are no longer kept."""
        ...

    def snapshot(
        self, epoch: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The table's own columns, then ``_vnode``. :raises RetentionMiss: they are no longer kept."""
        ...

    def change_log(
        self, after: int, upto: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The table's own columns, then ``_op``, ``_vnode`` and ``_epoch``, the epoch of the change.

        An update pair is never parted. :raises RetentionMiss: they are no longer kept.
        """
        ...

    def hold(self, owner: str, epoch: int) -> None:
        """Keep *epoch* and all that follow for *owner*, and what it held before no longer."""
        ...

    def release(self, owner: str) -> None:
        """Keep nothing for *owner*."""
        ...


def open_upstream(
    name: str,
    *,
    key: Sequence[str] = (),
    table: str = "",
    vnodes: int = DEFAULT_VNODE_COUNT,
    store: str = "",
    folder: str = "",
    storage: Mapping[str, str] | None = None,
) -> UpstreamTable:
    """The upstream table *name*; nothing is connected yet.

    :param key: Delta: the columns that name a row. :param table: Delta: what its rows are called downstream.
    :param vnodes: Delta: into how many its rows are hashed.
    :param store: of a table of ours: the store of its log. :param folder: … of the kept tables.
    :raises InvalidUpstream: no such kind, or what it needs is missing.
    """
    kind, colon, rest = name.partition(":")
    if not colon or not rest or kind not in (DELTA, KEPT):
        raise InvalidUpstream(f"Received upstream {name!r}.", next_step=_VALID)
    if kind == DELTA:
        from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream

        if not key:
            raise InvalidUpstream(
                "A Delta table has no key of its own.", next_step="Name the columns of its key with option 'key'."
            )
        place = rest if "://" in rest else str(Path(rest).expanduser().absolute())
        return DeltaUpstream(place, tuple(key), table, vnodes, dict(storage or {}))
    from headwater.backfill.snapshot.consume_upstream.versioned import VersionedUpstream

    if not store or not folder:
        raise InvalidUpstream(
            "A table that we keep needs the store of its log and the folder of its tables.",
            next_step="Set both, as the pipeline that keeps it has them.",
        )
    return VersionedUpstream(store, rest, folder)
