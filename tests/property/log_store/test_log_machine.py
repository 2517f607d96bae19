"""Random histories of a log against a plain model: a list of rows per vnode, and how far each vnode is done.

One or two instances with a live buffer, one consumer of another process, both formats, over the memory and the embedded
engine. After every read the model knows exactly what must come next: per vnode the next rows and no others, and the
barrier of an epoch only after all its rows. A crash forgets what was not sealed, and the epochs that vanished are
written again with other rows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.log_store import layout
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.log_view import LogView
from headwater.log_store.offset import LogOffset, StoragePlace
from headwater.log_store.reader import KvLogStoreReader
from headwater.log_store.remote import LogConsumer
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.log_store.writer import FlushOptions, KvLogStoreWriter
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap

VNODES = 8
FULL = VnodeBitmap.full(VNODES)
LAYOUTS = (
    (FULL,),
    (VnodeBitmap.of((0, 1, 2, 3), VNODES), VnodeBitmap.of((4, 5, 6, 7), VNODES)),
    (VnodeBitmap.of((1, 3, 5, 7), VNODES), VnodeBitmap.of((0, 2, 4, 6), VNODES)),
)
ROWS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=9)


@dataclass
class Side:
    """One instance, and what the model knows of its reader."""

    writer: KvLogStoreWriter
    reader: KvLogStoreReader
    vnodes: VnodeBitmap
    first: int
    needs: int
    paused: bool = False
    largest: int = 0
    epoch_rows: int = 0
    last_barrier: int = 0
    live: set[int] = field(default_factory=set)
    yielded: list[tuple[LogOffset, int, dict[int, int], bool]] = field(default_factory=list)
    queue: list[tuple[int, dict[int, int], bool, VnodeBitmap]] = field(default_factory=list)


class LogMachine(RuleBasedStateMachine):
    engine = ""
    log_format = 2
    trace: list[Any]
    traces: list[list[Any]] | None = None

    @initialize(
        number=st.integers(0, 2), max_rows=st.sampled_from([0, 6, 1000]), stage=st.sampled_from([200, 2000, 1 << 20])
    )
    def start(self, number: int, max_rows: int, stage: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-log-"))
        self.location = f"memory://{uuid.uuid4()}" if self.engine == "memory" else str(self.folder / "store")
        # A snapshot of the memory engine does not see what was staged while an older one is open.
        self.max_rows, self.stage = max_rows, stage if self.engine == "embedded" else 1 << 20
        self.stores: list[StateStore] = []
        self.factory: KvLogStoreFactory | None = None
        self.sides: list[Side] = []
        self.remote: LogConsumer | None = None
        self.remote_rows = dict.fromkeys(range(VNODES), 0)
        self.log: dict[int, list[tuple[int, str]]] = {vnode: [] for vnode in range(VNODES)}
        self.rows = dict.fromkeys(range(VNODES), 0)
        self.ended = dict.fromkeys(range(VNODES), 0)
        self.handed = (dict(self.rows), dict(self.ended))
        self.durable = (dict(self.rows), dict(self.ended))
        self.cursor = dict(self.rows)
        self.stored: set[int] = set()
        self.flags: dict[int, bool] = {}
        self.committed = self.flushed = self.newest_end = self.names = 0
        self.seen: dict[int, StoragePlace] = {}
        self.trace = []
        if self.traces is not None:
            self.traces.append(self.trace)
        self._open(LAYOUTS[number], 1)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _open(self, bitmaps: tuple[VnodeBitmap, ...], at: int) -> None:
        dead, self.stores = self.stores, [open_writer(self.location, takeover=bool(self.stores))]
        if self.factory is not None:
            self.factory.close()
        for store in dead:
            store.close()
        self.factory = KvLogStoreFactory(self.stores[-1], stage_bytes=self.stage)
        self.sides = [self._side(vnodes, at) for vnodes in bitmaps]
        self.now = at

    def _side(self, vnodes: VnodeBitmap, at: int) -> Side:
        assert self.factory is not None
        log = self.factory.log("t", SCHEMA, KEY, self.log_format, VNODES)
        reader, writer = self.factory.pair(log, "sink", vnodes, max_rows=self.max_rows, sleep=lambda _: None)
        reader._history_rows = 3
        writer.init(EpochPair(epoch(at), epoch(at - 1)))
        side = Side(writer, reader, vnodes, at, self.newest_end)
        reader.init(1)
        reader.start_from()
        self._restart(side)
        return side

    def _restart(self, side: Side) -> None:
        for vnode in side.vnodes:
            self.cursor[vnode] = self.rows[vnode]
        side.last_barrier = min(self.ended[vnode] for vnode in side.vnodes)
        side.yielded = []

    def _end(self, vnode: int, upto: int) -> int:
        return bisect_right(self.log[vnode], (upto, "\uffff"))

    def _next_barrier(self, side: Side) -> int | None:
        history = {number for number in self.stored if number < side.first}
        return min((number for number in history | side.live if number > side.last_barrier), default=None)

    def _hand_over(self, side: Side, before: int) -> None:
        rows, ended = self.handed
        while side.queue and side.queue[0][0] < before:
            number, counts, barrier, owned = side.queue.pop(0)
            for vnode in owned & side.vnodes:
                rows[vnode] = max(rows[vnode], counts.get(vnode, 0))
                if barrier:
                    ended[vnode] = max(ended[vnode], number)

    def _pick(self, which: int) -> Side:
        return self.sides[which % len(self.sides)]

    # -- writing -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), rows=ROWS)
    def write(self, which: int, rows: list[tuple[int, bool]]) -> None:
        side = self._pick(which)
        if side.paused:
            return
        ids, ops = [], []
        for key, pair in rows:
            ids += [key, key] if pair else [key]
            ops += [Op.UPDATE_DELETE, Op.UPDATE_INSERT] if pair else [Op.INSERT]
        names = [f"r{self.names + place:06d}" for place in range(len(ids))]
        self.names += len(ids)
        batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names)], schema=SCHEMA)
        chunk = Chunk.build(batch, ops, KEY, VNODES).filter_vnodes(side.vnodes)
        side.writer.write_chunk(chunk)
        side.largest = max(side.largest, chunk.num_rows)
        side.epoch_rows += chunk.num_rows
        for vnode, name in zip(chunk.vnodes.to_pylist(), chunk.rows.column("name").to_pylist(), strict=True):
            self.log[vnode].append((self.now, name))
        self.trace.append(("write", chunk.num_rows))

    def _flush(self, following: int, checkpoint: bool, options: list[dict[str, Any]]) -> None:
        ended = self.now
        for side, more in zip(self.sides, options, strict=True):
            flush = side.writer.flush_current_epoch(epoch(following), FlushOptions(checkpoint, **more))
            if not side.paused or side.epoch_rows:
                self.stored.add(ended)
            self.newest_end = ended
            side.epoch_rows = 0
            self._hand_over(side, ended)
            flush.finish()
            if more:
                self._hand_over(side, following)
            side.live.add(ended)
        self.flags[ended] = checkpoint
        self.flushed, self.now = ended, following
        self.trace.append(("flush", ended, checkpoint))

    @rule(skip=st.integers(1, 2), checkpoint=st.booleans(), seal=st.booleans())
    def flush(self, skip: int, checkpoint: bool, seal: bool) -> None:
        self._flush(self.now + skip, checkpoint, [{} for _ in self.sides])
        if seal:
            self.seal()

    @rule(
        times=st.integers(1, 3),
        rows=st.lists(ROWS, min_size=2, max_size=2),
        checkpoint=st.booleans(),
        seal=st.booleans(),
        taken=st.integers(0, 4),
    )
    def epochs(self, times: int, rows: list[list[tuple[int, bool]]], checkpoint: bool, seal: bool, taken: int) -> None:
        """Rows of all owners and a barrier, a few times, while they are delivered in part."""
        for _ in range(times):
            for which in range(len(self.sides)):
                self.write(which, rows[which])
                self.deliver(which, taken, taken)
            self.flush(1, checkpoint, seal)

    @rule()
    def seal(self) -> None:
        if self.flushed <= self.committed:
            return
        assert self.factory is not None
        self.factory.sealer.seal(epoch(self.flushed))
        self.committed = self.flushed
        self.durable = (dict(self.handed[0]), dict(self.handed[1]))
        self._nothing_is_left_behind()

    @rule(number=st.integers(0, 2), checkpoint=st.booleans(), seal=st.booleans())
    def scale(self, number: int, checkpoint: bool, seal: bool) -> None:
        """Other owners from the next epoch on: instances are moved, stopped and added."""
        bitmaps = LAYOUTS[number]
        kept = self.sides[: len(bitmaps)]
        options = [{"new_vnode_bitmap": bitmap} for _, bitmap in zip(kept, bitmaps, strict=False)]
        stopped = self.sides[len(bitmaps) :]
        self._flush(self.now + 1, checkpoint, [*options, *({"is_stop": True} for _ in stopped)])
        if seal:
            self.seal()
        for side, bitmap in zip(kept, bitmaps, strict=False):
            side.vnodes, side.first, side.needs, side.live = bitmap, self.now, self.newest_end, set()
            side.reader.init(1)
            side.reader.start_from()
            self._restart(side)
        self.sides = [*kept, *(self._side(bitmap, self.now) for bitmap in bitmaps[len(kept) :])]
        self.trace.append(("scale", number))

    @rule(which=st.integers(0, 1))
    def pause_or_resume(self, which: int) -> None:
        side = self._pick(which)
        side.writer.resume() if side.paused else side.writer.pause()
        side.paused = not side.paused

    @rule(number=st.integers(0, 2), skip=st.integers(1, 3))
    def crash(self, number: int, skip: int) -> None:
        """The process dies; another takes over, and writes the epochs that vanished with other rows."""
        self.rows, self.ended = dict(self.durable[0]), dict(self.durable[1])
        self.handed = (dict(self.rows), dict(self.ended))
        for vnode, rows in self.log.items():
            self.log[vnode] = rows[: self._end(vnode, self.committed)]
        self.stored = {number for number in self.stored if number <= self.committed}
        self.flushed, self.newest_end = self.committed, 0
        self.seen = {}
        self._open(LAYOUTS[number], self.committed + skip)
        self.trace.append(("crash", number))

    # -- reading -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), times=st.integers(1, 6))
    def read(self, which: int, times: int) -> None:
        side = self._pick(which)
        for _ in range(times):
            item = side.reader.next_item(0.0)
            barrier = self._next_barrier(side)
            self.trace.append((type(item).__name__, None if item is None else item.epoch.ms))
            if side.paused or (side.needs and self.committed < side.needs):
                assert item is None
                return
            side.needs = 0
            if item is None:
                assert barrier is None
                assert all(self.cursor[vnode] == len(self.log[vnode]) for vnode in side.vnodes)
                return
            number = item.epoch.ms
            assert number == (self.now if barrier is None else barrier)
            if isinstance(item, ChunkItem):
                assert item.chunk.num_rows
                names = item.chunk.rows.column("name").to_pylist()
                for vnode, name in zip(item.chunk.vnodes.to_pylist(), names, strict=True):
                    assert vnode in side.vnodes
                    assert self.log[vnode][self.cursor[vnode]] == (number, name)
                    self.cursor[vnode] += 1
            else:
                assert isinstance(item, BarrierItem)
                assert item.is_checkpoint == self.flags[number]
                side.last_barrier = number
                for vnode in side.vnodes:
                    assert self.cursor[vnode] >= self._end(vnode, number), "all rows come before their barrier"
            counts = {vnode: self.cursor[vnode] for vnode in side.vnodes}
            side.yielded.append((item.offset, number, counts, isinstance(item, BarrierItem)))

    @rule(which=st.integers(0, 1), place=st.integers(0, 9))
    def truncate(self, which: int, place: int) -> None:
        side = self._pick(which)
        if not side.yielded:
            return
        place %= len(side.yielded)
        side.reader.truncate(side.yielded[place][0])
        for _, number, counts, barrier in side.yielded[: place + 1]:
            side.queue.append((number, counts, barrier, side.vnodes))
            for vnode in side.vnodes:
                self.rows[vnode] = max(self.rows[vnode], counts[vnode])
                if barrier:
                    self.ended[vnode] = max(self.ended[vnode], number)
        del side.yielded[: place + 1]

    @rule(which=st.integers(0, 1), times=st.integers(0, 9), place=st.integers(0, 9))
    def deliver(self, which: int, times: int, place: int) -> None:
        self.read(which, times)
        self.truncate(which, place)

    @rule(which=st.integers(0, 1))
    def rewind(self, which: int) -> None:
        side = self._pick(which)
        side.reader.rewind()
        side.reader.start_from()
        self._restart(side)

    # -- a consumer of another process ---------------------------------------------------------------------------

    def _sealed_rows(self, vnode: int) -> list[tuple[int, str]]:
        return self.log[vnode][: self._end(vnode, self.committed)]

    @precondition(lambda self: self.committed > 0)
    @rule(restart=st.booleans(), commit=st.sampled_from(["no", "all", "even"]))
    def read_elsewhere(self, restart: bool, commit: str) -> None:
        if self.remote is None and self.flushed > self.committed:
            return  # the writer has looked for consumers already: such a one starts at what the seal leaves
        if self.remote is None or restart:
            dead = self.remote
            self.remote = LogConsumer.open(self.location, "t", "mirror", takeover=dead is not None)
            if dead is not None:
                dead.close()
            else:
                begun = self.remote.delivered().ms
                self.remote_rows = {vnode: self._end(vnode, begun) for vnode in range(VNODES)}
        after, upto = self.remote.wait(0.0)
        assert upto == epoch(self.committed) or after == upto
        found: dict[int, list[tuple[int, str]]] = {vnode: [] for vnode in range(VNODES)}
        for batch in self.remote.read(after, upto):
            columns = (batch.column(name).to_pylist() for name in ("_vnode", "_epoch", "name"))
            for vnode, number, name in zip(*columns, strict=True):
                found[vnode].append((Epoch(number).ms, name))
        assert found == {vnode: self._sealed_rows(vnode)[self.remote_rows[vnode] :] for vnode in range(VNODES)}
        if commit != "no" and upto > after:
            vnodes = VnodeBitmap.of(range(0, VNODES, 2), VNODES) if commit == "even" else FULL
            self.remote.commit(upto, vnodes)
            for vnode in vnodes:
                self.remote_rows[vnode] = len(self._sealed_rows(vnode))

    @precondition(lambda self: self.committed > 0)
    @rule(low=st.integers(0, 20), high=st.integers(0, 20), bitmap=st.sampled_from([FULL, *LAYOUTS[1], *LAYOUTS[2]]))
    def read_a_range(self, low: int, high: int, bitmap: VnodeBitmap) -> None:
        with self.stores[-1].snapshot() as view:
            shown = LogView.open(view, "t")
            gone = shown.bounds().gone.ms
            after = min(max(gone, low), self.committed)
            upto = min(max(after, high), self.committed)
            runs = [list(shown.read_range(epoch(after), epoch(upto), bitmap)) for _ in range(2)]
        assert [batch.to_pydict() for batch in runs[0]] == [batch.to_pydict() for batch in runs[1]]
        found: dict[int, list[tuple[int, str]]] = {vnode: [] for vnode in bitmap}
        for batch in runs[0]:
            columns = (batch.column(name).to_pylist() for name in ("_vnode", "_epoch", "name"))
            for vnode, number, name in zip(*columns, strict=True):
                found[vnode].append((Epoch(number).ms, name))
        for vnode, rows in found.items():
            assert rows == self.log[vnode][self._end(vnode, after) : self._end(vnode, upto)]

    # -- always ------------------------------------------------------------------------------------------------

    @invariant()
    def the_buffer_is_bounded(self) -> None:
        for side in self.sides:
            held = side.reader._buffer.statistics()
            assert held.rows <= (self.max_rows - 1 + side.largest if self.max_rows else 0)

    @invariant()
    def progress_never_goes_back(self) -> None:
        if self.factory is None:
            return
        for consumer in self.factory.consumers.of("t"):
            for vnode, place in consumer.progress.places():
                assert vnode not in self.seen or place >= self.seen[vnode]
                self.seen[vnode] = place

    def _nothing_is_left_behind(self) -> None:
        """What is stored belongs to an epoch that is held, or to one that is not sealed yet."""
        with self.stores[-1].snapshot() as view:
            shown = LogView.open(view, "t")
            held = {end.epoch for end in shown.epochs()}
            for key, _ in view.scan_prefix(layout.prefix(shown.log.number)):
                number = key[7:15] if key[4] == layout.ROWS else key[5:13]
                stored = Epoch(int.from_bytes(number, "big"))
                assert stored in held or stored > self.committed, "rows of an epoch that is over"

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        if self.remote is not None:
            self.remote.close()
        if self.factory is not None:
            self.factory.close()
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def machine(engine: str, log_format: int, traces: list[list[Any]] | None = None) -> type[LogMachine]:
    return type("Machine", (LogMachine,), {"engine": engine, "log_format": log_format, "traces": traces})


@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(("engine", "examples"), [("memory", 100), ("embedded", 20)])
def test_m21_a_log_does_what_the_model_says(engine: str, examples: int, log_format: int) -> None:
    run_state_machine_as_test(
        machine(engine, log_format),
        settings=settings(
            max_examples=examples * (20 if "HEADWATER_SOAK" in os.environ else 1),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_same_seed_gives_the_same_trace() -> None:
    runs: list[list[list[Any]]] = []
    for _ in range(2):
        traces: list[list[Any]] = []
        run_state_machine_as_test(
            machine("memory", 2, traces),
            settings=settings(
                max_examples=5,
                stateful_step_count=20,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runs.append(traces)
    assert runs[0] == runs[1]
    assert any(runs[0])
