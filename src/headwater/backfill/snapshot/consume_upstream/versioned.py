"""VersionedUpstream: a table that we keep ourselves as an upstream table, of this pipeline or of another one.

Its change log is net over any range of epochs, so that a consumer which is behind reads one range, and not each epoch.
What a consumer needs is pinned under its name: the base of the table does not go past it, and nothing expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pyarrow as pa

from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochMismatch,
    RetentionMiss,
    UpstreamDropped,
    UpstreamWaits,
    VersionExpired,
)
from headwater.backfill.snapshot.consume_upstream.upstream_table import Cut, VnodeRange
from headwater.log_store.columns import EPOCH, VNODE
from headwater.sources.table import SourceTable
from headwater.state import open_reader
from headwater.stream import Epoch, vnodes_of
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT
from headwater.versioned import BaseGone, NotComplete, NotYet, TableNotKept, VersionedTable

RESNAPSHOT: Final = "Read the table once more: headwater resnapshot --store STORE --query NAME"
_LOOK_SECONDS: Final = 0.1

_T = TypeVar("_T")


@dataclass(frozen=True)
class VersionedUpstream:
    """A kept table.

    :ivar store: of the log. :ivar full_name: of the table. :ivar folder: of the kept tables.
    """

    store: str
    full_name: str
    folder: str
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionedUpstream, (self.store, self.full_name, self.folder)

    @property
    def name(self) -> str:
        return f"table:{self.full_name}"

    @property
    def identity(self) -> str:
        return str(self.table(self.newest_epoch()).source_id)

    @property
    def vnode_count(self) -> int:
        return self._kept.vnode_count

    @property
    def _kept(self) -> VersionedTable:
        if "table" not in self._held:
            self._held["table"] = self._told(
                lambda: VersionedTable.open(self.store, self.full_name, self.folder), VersionExpired
            )
        found: VersionedTable = self._held["table"]
        return found

    def _told(self, call: Callable[[], _T], gone: type[RetentionMiss]) -> _T:
        try:
            return call()
        except BaseGone as error:
            raise gone(error.message, next_step=RESNAPSHOT) from None
        except TableNotKept as error:
            raise UpstreamDropped(error.message, next_step=error.next_step) from None
        except (NotComplete, NotYet) as error:
            raise UpstreamWaits(error.message, next_step=error.next_step) from None

    # -- epochs ----------------------------------------------------------------------------------------------------

    def table(self, epoch: int) -> SourceTable:
        return self._told(lambda: self._kept.table(epoch), VersionExpired)

    def newest_epoch(self) -> int:
        return self._told(lambda: self._kept.newest_epoch, VersionExpired)

    def _base_epoch(self) -> int:
        return self._told(lambda: self._kept.base_epoch, VersionExpired)

    def next_epoch(self, after: int, upto: int | None = None) -> int | None:
        """The newest, or *upto* if that is before it.

        A table that stands still until its history is read once more is let go: while it is held, that does not begin.
        What follows cannot be told by a change log, so the consumer stops there, and says so.
        """
        newest = self.newest_epoch()
        if newest < after:
            raise EpochMismatch(
                f"Table {self.full_name} is at epoch {newest}, and {after} was consumed: its store was created again.",
                next_step=RESNAPSHOT,
            )
        if after < self._base_epoch():
            raise ChangeLogGone(
                f"The changes of table {self.full_name} after epoch {after} are no longer kept.", next_step=RESNAPSHOT
            )
        found = newest if upto is None else min(newest, upto)
        if found <= after and "pin" in self._held and self._stands_still():
            self.release(self._held["pin"][0])
        return found if found > after else None

    def _stands_still(self) -> bool:
        with open_reader(self.store) as reader, reader.snapshot() as view:
            sealed = int(view.epoch)
        return self.newest_epoch() < sealed

    def wait_for_epoch(self, after: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.newest_epoch() <= after and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))

    def commit_version(self, epoch: int) -> int:
        return epoch

    def epoch_of_version(self, version: int) -> int:
        return int(Epoch(version))

    def commit_time_us(self, epoch: int) -> int:
        return Epoch(epoch).unix_ms * 1000

    def epoch_at(self, time_ms: int) -> int | None:
        """Any epoch from the base on can be begun at."""
        wanted = max(0, time_ms - ORIGIN_UNIX_MS) << PHYSICAL_SHIFT
        if wanted < self._base_epoch():
            raise ChangeLogGone(
                f"What changed in table {self.full_name} from that time on is no longer kept.", next_step=RESNAPSHOT
            )
        return None if wanted > self.newest_epoch() else wanted

    # -- planning --------------------------------------------------------------------------------------------------

    def check_changes(self, after: int) -> None:
        """Nothing: changes are always kept, or the next epoch is refused."""

    def check_snapshot(self, epoch: int) -> None:
        self.table(epoch)

    def snapshot_cuts(self, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        blocks = self._told(lambda: self._kept.blocks(epoch, vnodes), VersionExpired)
        return [Cut(block.vnode, block.first or None, block.rows) for block in blocks]

    def change_cuts(self, after: int, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        """None inside a vnode: what changed is found by a merge of the whole range."""
        self._told(lambda: self._kept.table(after), ChangeLogGone)
        return ()

    # -- reading ---------------------------------------------------------------------------------------------------

    def snapshot(
        self, epoch: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        table, count = self.table(epoch), self.vnode_count
        for batch in self._each(self._kept.snapshot(epoch, vnodes, start=start, end=end), VersionExpired):
            numbers = vnodes_of(batch, table.key_columns, count)
            yield batch.append_column(pa.field(VNODE, pa.uint16(), False), numbers)

    def change_log(
        self, after: int, upto: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._each(self._kept.changes(after, upto, vnodes), ChangeLogGone):
            epochs = pa.repeat(pa.scalar(upto, pa.uint64()), batch.num_rows)
            yield batch.append_column(pa.field(EPOCH, pa.uint64(), False), epochs)

    def _each(self, batches: Iterator[pa.RecordBatch], gone: type[RetentionMiss]) -> Iterator[pa.RecordBatch]:
        while (batch := self._told(lambda: next(batches, None), gone)) is not None:
            yield batch

    # -- pins ------------------------------------------------------------------------------------------------------

    def hold(self, owner: str, epoch: int) -> None:
        """:raises RetentionMiss: it is folded already."""
        if self._held.get("pin") != (owner, epoch):
            self._told(lambda: self._kept.pin(owner, epoch, name=_pin_name(owner)), VersionExpired)
            self._held["pin"] = (owner, epoch)

    def release(self, owner: str) -> None:
        self._held.pop("pin", None)
        self._kept.release(_pin_name(owner))


def _pin_name(owner: str) -> str:
    return "".join(one if one.isalnum() or one in "-_" else f"~{ord(one):x}~" for one in f"upstream-{owner}")
