"""Owners that consume one upstream table between barriers, over crashes, and what must hold after each of them.

What is durable: the state store, what the downstream had at the last durable barrier, and what the table holds. All
else is lost in a crash. Everything follows from the calls: no clock, no chance; :attr:`Owners.trace` tells what
happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Protocol

from tests.unit.backfill.upstream_model import Downstream, Rows, key_of, vnode_of

from headwater.backfill.snapshot.consume_upstream.errors import RetentionMiss
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamOptions, UpstreamTableExecutor
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.backfill.snapshot.state import BackfillState, VnodeProgress
from headwater.state import Catalog, WriteBatch, open_writer
from headwater.stream import (
    Barrier,
    BarrierKind,
    Epoch,
    EpochPair,
    Mutation,
    Resume,
    Throttle,
    VnodeBitmap,
)

NAMES = ("a", "b", "c")
_stores = count()


class Upstream(Protocol):
    """A table under test."""

    @property
    def table(self) -> UpstreamTable: ...

    def write(self, changes: Mapping[int, int | None]) -> None:
        """The next epoch."""

    def rows(self, epoch: int) -> Rows:
        """The truth, also of epochs that the table has forgotten."""

    def compact(self) -> None:
        """Forget what nobody holds."""

    def forget(self) -> None:
        """Forget all that is old, held or not."""


class Owners:
    """The owners of the vnodes of one table, and their downstream."""

    def __init__(self, upstream: Upstream, batch_rows: int = 6) -> None:
        self.upstream, self.table = upstream, upstream.table
        self.options = UpstreamOptions(batch_rows=batch_rows, batch_epochs=2)
        self.count = self.table.vnode_count
        self.now = 0.0
        self.trace: list[str] = []
        self.may_stop = False
        self._store = open_writer(f"memory://upstream-machine-{next(_stores)}")
        self._batch = WriteBatch()
        with self._store.snapshot() as view:
            self._states = BackfillState.open_table(Catalog.load(view), self._batch)
        self._pair = EpochPair(Epoch.from_ms(2), Epoch.from_ms(1))
        self.downstream, self._kept = Downstream(), Downstream()
        self.snapshot_epoch = self._kept_epoch = self.table.newest_epoch()
        self.owned = {"a": VnodeBitmap.full(self.count)}
        self.executors: dict[str, UpstreamTableExecutor] = {}
        self._open()
        self._hold()

    def close(self) -> None:
        self._store.close()

    def _open(self) -> None:
        with self._store.snapshot() as view:
            self.executors = {
                owner: UpstreamTableExecutor(
                    self.table,
                    BackfillState.load(self._states, view, self.table.name, vnodes),
                    self.snapshot_epoch,
                    self.options,
                )
                for owner, vnodes in self.owned.items()
            }
        self._pair = EpochPair(self._pair.curr.next(), self._pair.curr)
        for executor in self.executors.values():
            assert executor.plan(Barrier(self._pair, BarrierKind.INITIAL), self.now) == []

    # -- steps -----------------------------------------------------------------------------------------------------

    def barrier(self, kind: BarrierKind, mutation: Mutation | None = None, seconds: float = 1.0) -> int:
        """One barrier through all owners; how many parts were read before it."""
        self.now += seconds
        self._pair = self._pair.next(self._pair.curr.next())
        barrier = Barrier(self._pair, kind, mutation)
        made = 0
        for owner, executor in self.executors.items():
            was = executor.stopped
            parts = executor.plan(barrier, self.now)
            assert not (was is not None and parts), "what is stopped reads nothing"
            for part in parts:
                self.downstream.read(self.table, part)
                self.trace.append(f"{owner} {part.to_json()}")
            made += len(parts)
        if barrier.is_durable:
            self._seal()
            self._hold()
        self.check()
        return made

    def _seal(self) -> None:
        for executor in self.executors.values():
            executor.save(self._batch)
        self._store.seal(self._pair.curr, self._batch)
        self._batch = WriteBatch()
        self._kept, self._kept_epoch = self.downstream.copy(), self.snapshot_epoch

    def _hold(self) -> None:
        """What owners need; one that has no vnodes, or has not taken its new ones over yet, does not know."""
        try:
            needed = [executor.needed_epoch for executor in self.executors.values() if executor.vnodes]
            self.table.hold("machine", min(needed))
        except RetentionMiss:
            assert self.may_stop

    def crash(self) -> None:
        """All processes are gone; pauses and throttles of theirs, too."""
        self.trace.append("crash")
        self._batch = WriteBatch()
        with self._store.snapshot() as view:  # the catalog may not be sealed yet
            self._states = BackfillState.open_table(Catalog.load(view), self._batch)
        self.downstream, self.snapshot_epoch = self._kept.copy(), self._kept_epoch
        self._open()
        self.check()

    def resnapshot(self) -> None:
        """A person asks for it; durable at once."""
        self.trace.append("resnapshot")
        self.snapshot_epoch = self.table.newest_epoch()
        self.table.hold("machine", self.snapshot_epoch)
        self.downstream = Downstream()
        for executor in self.executors.values():
            executor.restart(self.snapshot_epoch)
        self.may_stop = False
        self.barrier(BarrierKind.CHECKPOINT)

    def finish(self) -> None:
        """Everything is read, whatever was asked before: the downstream is the table."""
        if any(executor.stopped for executor in self.executors.values()):
            self.resnapshot()
        self.barrier(BarrierKind.BARRIER, Resume())
        self.barrier(BarrierKind.BARRIER, Throttle(None))
        for _ in range(1000):
            if not self.barrier(BarrierKind.CHECKPOINT) and not self._is_behind():
                break
            if any(executor.stopped for executor in self.executors.values()):
                self.resnapshot()
        else:
            raise AssertionError("it does not end")
        newest = self.table.newest_epoch()
        assert self.downstream.rows == self.upstream.rows(newest)
        assert {executor.consumed_epoch for executor in self.executors.values() if executor.vnodes} == {newest}

    def _is_behind(self) -> bool:
        newest = self.table.newest_epoch()
        return any(executor.consumed_epoch < newest for executor in self.executors.values() if executor.vnodes)

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each vnode has exactly the rows of what it claims."""
        seen: set[int] = set()
        has = _by_vnode(self.downstream.rows, self.count)
        for executor in self.executors.values():
            assert executor.phase is not StreamPhase.FAILED
            assert executor.stopped is None or self.may_stop, "what is held is not forgotten"
            for vnode, row in executor.progress():
                assert vnode not in seen, "a vnode has one owner"
                seen.add(vnode)
                assert has.get(vnode, {}) == self._claimed(vnode, row), f"vnode {vnode}"
        assert seen == set(range(self.count))

    def _claimed(self, vnode: int, row: VnodeProgress | None) -> Rows:
        if row is None:
            return {}
        new = self._of(vnode, row.epoch)
        if row.position is None:
            return new
        old = {} if row.epoch == self.snapshot_epoch else self._of(vnode, row.epoch - 1)
        cut = key_of(row.position)
        return {key: value for key, value in new.items() if key < cut} | {
            key: value for key, value in old.items() if key >= cut
        }

    def _of(self, vnode: int, epoch: int) -> Rows:
        rows = self.upstream.rows(epoch)
        return {key: rows[key] for key in rows if vnode_of(key, self.count) == vnode}


def _by_vnode(rows: Rows, count: int) -> dict[int, Rows]:
    made: dict[int, Rows] = {}
    for key, value in rows.items():
        made.setdefault(vnode_of(key, count), {})[key] = value
    return made
