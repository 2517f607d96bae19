"""Synced logs against a plain model: each row is worked on once, in the order of its vnode, whatever crashes when.

Somebody polls one or two instances of a log, works on rows, and seals what he got with the checkpoint. The model is a
list of rows per vnode and a place in it: the next row that is polled must be the next of its vnode. A crash goes back
to what was sealed, on all sides: the rows of later epochs were never there, and others come in their place. Watermarks
must keep their promise (no lower id follows), and after a drain the newest one must have come.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, field

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.store.log_store.synced_tools import WORK, Clock, log_keys

from headwater.log_store.aligned import AlignedLogStore
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.synced import SyncedLogStore, SyncedMessage, SyncedOptions
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.log_store.watermarks import Watermark
from headwater.state import StateStore, open_writer
from headwater.state.engines.memory import drop_memory_store
from headwater.stream import Barrier, BarrierKind, Chunk, EpochPair, Mutation, Op, Pause, Resume, VnodeBitmap

VNODES = 8
FULL = VnodeBitmap.full(VNODES)
LAYOUTS = ((FULL,), FULL.split(2), (VnodeBitmap.of((0, 3, 4), VNODES), VnodeBitmap.of((1, 2, 5, 6, 7), VNODES)))
ROWS = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6)
KINDS = st.sampled_from((*[BarrierKind.CHECKPOINT] * 5, *[BarrierKind.BARRIER] * 2, BarrierKind.SYNC_CHECKPOINT))
MODES = st.sampled_from(("synced", "synced", "synced", "aligned"))


@dataclass
class Side:
    """One instance and what came out of it."""

    store: SyncedLogStore | AlignedLogStore
    vnodes: VnodeBitmap
    work: list[tuple[int, str]] = field(default_factory=list)
    waiting: Barrier | None = None
    sealing: list[tuple[int, str]] = field(default_factory=list)
    pending: int = 0
    open: int = 0
    low: int = -1
    sealing_low: int = -1
    sealed_low: int = -1


class SyncedMachine(RuleBasedStateMachine):
    """Up to two instances of one log."""

    stores: list[StateStore]

    @initialize(log_format=st.sampled_from((1, 2)), layout=st.integers(0, 2), max_rows=st.sampled_from((0, 4, 9, 100)))
    def begin(self, log_format: int, layout: int, max_rows: int) -> None:
        self.name = str(uuid.uuid4())
        self.location = f"memory://{self.name}"
        self.stores = []
        self.factory: KvLogStoreFactory | None = None
        self.log_format = log_format
        self.pushed: list[list[tuple[int, str]]] = [[] for _ in range(VNODES)]
        self.committed: list[list[str]] = [[] for _ in range(VNODES)]
        self.promised: list[tuple[int, int]] = []
        self.names = 0
        self.layout = layout
        self.moved = False
        self.sides: list[Side] = []
        self.open(layout, max_rows, "synced")

    def open(self, layout: int, max_rows: int, mode: str) -> None:
        self.stores.append(open_writer(self.location, takeover=bool(self.stores)))
        if self.factory is not None:
            self.factory.close()
        self.factory = KvLogStoreFactory(self.stores[-1], stage_bytes=600)
        log = self.factory.log("t", SCHEMA, KEY, self.log_format, VNODES)
        self.clock = Clock()
        sealed = self.stores[-1].committed_epoch().ms
        self.now = sealed + 1
        self.mode, self.paused = mode, False
        self.first = self.now
        self.moved = self.moved or layout != self.layout  # then a watermark may be known of some vnodes only
        lows = [-1, -1] if self.moved else [side.sealed_low for side in self.sides] or [-1, -1]
        self.layout = layout
        self.pushed = [[row for row in rows if row[0] <= sealed] for rows in self.pushed]
        self.promised = [promise for promise in self.promised if promise[0] <= sealed]
        self.place = [len(rows) for rows in self.committed]
        self.sides = []
        first = Barrier(EpochPair(epoch(self.now), epoch(self.now - 1)), BarrierKind.INITIAL)
        for number, vnodes in enumerate(LAYOUTS[layout]):
            owner = f"part {number}"
            options = SyncedOptions(max_rows=max_rows, history_rows=3, pause_seconds=0.064 if max_rows % 2 else 0)
            store: SyncedLogStore | AlignedLogStore
            if mode == "aligned":
                store = self.factory.synced.aligned(log, vnodes, owner=owner, history_rows=3)
            else:
                store = self.factory.synced.store(log, vnodes, owner=owner, options=options, clock=self.clock)
                store._buffer._chunk_rows = 5
            store.push(first)
            assert store.poll() is first
            self.sides.append(Side(store, vnodes, open=self.now, sealed_low=lows[number]))

    # -- from above --------------------------------------------------------------------------------------------

    def push(self, side: Side, message: SyncedMessage) -> None:
        while not side.store.wants_input:  # aligned mode takes one message at a time
            self.poll_once(side)
        side.store.push(message)

    @rule(chunks=st.lists(ROWS, min_size=1, max_size=4))
    def rows(self, chunks: list[list[tuple[int, bool]]]) -> None:
        for rows in chunks:
            self.push_rows(rows)

    @rule(chunks=st.lists(ROWS, min_size=2, max_size=4), polls=st.integers(0, 2))
    def rows_and_a_checkpoint_that_is_not_held(self, chunks: list[list[tuple[int, bool]]], polls: int) -> None:
        self.rows(chunks)
        for side in self.sides:
            self.poll_side(side, polls)
        self.checkpoint_at_once()

    @rule(chunks=st.lists(ROWS, min_size=1, max_size=2), more=st.integers(1, 5))
    def rows_and_a_watermark(self, chunks: list[list[tuple[int, bool]]], more: int) -> None:
        self.rows(chunks)
        self.watermark(more)
        self.rows(chunks)

    def push_rows(self, rows: list[tuple[int, bool]]) -> None:
        low = self.promised[-1][1] if self.promised else 0
        ids, ops = [], []
        for more, pair in rows:
            ids += [low + more] * (1 + pair)
            ops += [Op.UPDATE_DELETE, Op.UPDATE_INSERT] if pair else [Op.INSERT]
        names = [f"r{self.names + place:06d}" for place in range(len(ids))]
        self.names += len(ids)
        batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names)], schema=SCHEMA)
        chunk = Chunk.build(batch, ops, KEY, VNODES)
        for vnode, name in zip(chunk.vnodes.to_pylist(), names, strict=True):
            self.pushed[vnode].append((self.now, name))
        for side in self.sides:
            self.push(side, chunk.filter_vnodes(side.vnodes))

    @rule(more=st.integers(0, 5))
    def watermark(self, more: int) -> None:
        value = (self.promised[-1][1] if self.promised else 0) + more
        self.promised.append((self.now, value))
        for side in self.sides:
            self.push(side, Watermark("id", pa.scalar(value, pa.int64())))

    @rule(kind=KINDS)
    def barrier(self, kind: BarrierKind) -> None:
        self.push_barrier(kind)

    @rule()
    def checkpoint_at_once(self) -> None:
        """With the time over that it may be held."""
        self.push_barrier(BarrierKind.CHECKPOINT)
        for side in self.sides:
            if side.waiting is None:
                self.poll_side(side, 1)  # if it is held, it is now
        self.tick(1.0)
        self.poll_all()

    @precondition(lambda self: self.mode == "synced" and (self.paused or self.now % 5 == 0))
    @rule()
    def pause_or_resume(self) -> None:
        self.push_barrier(BarrierKind.BARRIER, Resume() if self.paused else Pause())
        self.paused = not self.paused

    def push_barrier(self, kind: BarrierKind, mutation: Mutation | None = None) -> None:
        if max(side.pending for side in self.sides) > 2:
            self.poll_all()
        barrier = Barrier(EpochPair(epoch(self.now + 1), epoch(self.now)), kind, mutation)
        self.now += 1
        for side in self.sides:
            self.push(side, barrier)
            side.pending += 1
        if self.mode == "aligned":
            self.poll_all()

    # -- polling -----------------------------------------------------------------------------------------------

    def poll_once(self, side: Side) -> SyncedMessage | None:
        item = side.store.poll()
        if isinstance(item, Chunk):
            columns = (item.vnodes, item.rows.column("id"), item.rows.column("name"))
            for vnode, key, name in zip(*(column.to_pylist() for column in columns), strict=True):
                assert vnode in side.vnodes
                number, expected = self.pushed[vnode][self.place[vnode]]
                assert name == expected
                assert number <= side.open
                assert key >= max(side.low, side.sealed_low)
                self.place[vnode] += 1
                side.work.append((vnode, name))
        elif isinstance(item, Watermark):
            value = item.value.as_py()
            assert value > side.low
            assert value in [promised for number, promised in self.promised if number <= side.open]
            side.low = value
        elif isinstance(item, Barrier):
            side.pending -= 1
            side.open = item.opens.ms
            if item.is_durable:
                side.waiting, side.sealing, side.work = item, side.work, []
                side.sealing_low = max(side.low, side.sealed_low)
                self.seal_when_all_are_there()
        return item

    def seal_when_all_are_there(self) -> None:
        assert self.factory is not None
        waiting = [side.waiting for side in self.sides]
        barrier = waiting[0]
        if barrier is None or any(other is not barrier for other in waiting):
            return
        rows = [row for side in self.sides for row in side.sealing]
        self.factory.sealer.batch.put(WORK + int(barrier.closes).to_bytes(8, "big"), json.dumps(rows).encode())
        self.factory.sealer.seal(barrier.closes)
        for vnode, name in rows:
            self.committed[vnode].append(name)
        for side in self.sides:
            side.waiting, side.sealing, side.sealed_low = None, [], side.sealing_low

    @rule(which=st.integers(0, 1), times=st.integers(1, 2))
    def poll(self, which: int, times: int) -> None:
        self.poll_side(self.sides[which % len(self.sides)], times)

    def poll_side(self, side: Side, times: int) -> None:
        for _ in range(times):
            if side.waiting is None or not side.pending:
                self.poll_once(side)

    def poll_all(self) -> None:
        """Until every barrier came out."""
        while any(side.pending for side in self.sides):
            for side in self.sides:
                if side.pending and side.waiting is None:
                    assert self.poll_once(side) is not None or self.mode == "aligned"

    @rule(seconds=st.sampled_from((0.01, 0.07)))
    def tick(self, seconds: float) -> None:
        self.clock.now += seconds

    # -- crashes -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.now > self.first + 1)
    @rule(layout=st.integers(0, 2), stay=st.booleans(), max_rows=st.sampled_from((0, 4, 9, 100)), mode=MODES)
    def crash(self, layout: int, stay: bool, max_rows: int, mode: str) -> None:
        self.open(self.layout if stay else layout, max_rows, mode)
        self.check_committed()

    def check_committed(self) -> None:
        found: list[list[str]] = [[] for _ in range(VNODES)]
        with self.stores[-1].snapshot() as view:
            for _, data in view.scan_prefix(WORK):
                for vnode, name in json.loads(bytes(data)):
                    found[vnode].append(name)
        assert found == self.committed
        for vnode, names in enumerate(found):
            assert names == [name for _, name in self.pushed[vnode][: len(names)]]

    def drain(self) -> None:
        if self.paused:
            self.pause_or_resume()
        self.push_barrier(BarrierKind.SYNC_CHECKPOINT)
        self.poll_all()
        self.check_committed()
        assert self.place == [len(rows) for rows in self.pushed] == [len(rows) for rows in self.committed]
        if self.promised and not self.moved:
            for side in self.sides:
                assert side.sealed_low == self.promised[-1][1]

    def teardown(self) -> None:
        if not hasattr(self, "factory") or self.factory is None:
            return
        for _ in range(3):
            self.drain()
        assert log_keys(self.stores[-1]) == 0
        self.factory.close()
        for store in self.stores:
            store.close()
        drop_memory_store(self.name)


def test_a_synced_log_does_what_the_model_says() -> None:
    run_state_machine_as_test(
        SyncedMachine,
        settings=settings(
            max_examples=60 * (30 if "HEADWATER_SOAK" in os.environ else 1),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
