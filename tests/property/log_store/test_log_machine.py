"""Random histories of a log against a plain model (:mod:`log_model`): rows per vnode, and how far each vnode is done.

One or two instances with a live buffer, one consumer of another process, pins, both formats and the way from one to the
other, key compactions, schema changes, over the memory and the embedded engine. After every read the model knows
exactly what must come next: per vnode the next rows and no others, and the barrier of an epoch only after all its rows.
A crash forgets what was not sealed, and the epochs that vanished are written again with other rows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.property.log_store.log_model import (
    ALWAYS,
    FULL,
    VNODES,
    Model,
    Ranges,
    Row,
    rows_in,
    schema_of,
    shown_rows,
)

from headwater import failpoints
from headwater.log_store import layout
from headwater.log_store.bounds import announced
from headwater.log_store.compaction import Compaction
from headwater.log_store.errors import DrainTimeout, EpochGone, WrongCall
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.log_view import LogView
from headwater.log_store.migration import Migration
from headwater.log_store.offset import LogOffset, StoragePlace
from headwater.log_store.reader import KvLogStoreReader
from headwater.log_store.remote import LogConsumer
from headwater.log_store.testing import KEY, epoch
from headwater.log_store.writer import FlushOptions, KvLogStoreWriter
from headwater.state import StateStore, open_writer
from headwater.state.engines.memory import drop_memory_store, memory_names
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap

LAYOUTS = (
    (FULL,),
    (VnodeBitmap.of((0, 1, 2, 3), VNODES), VnodeBitmap.of((4, 5, 6, 7), VNODES)),
    (VnodeBitmap.of((1, 3, 5, 7), VNODES), VnodeBitmap.of((0, 2, 4, 6), VNODES)),
)
ROWS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from("iidu")), min_size=1, max_size=9)
OPS = {"i": [Op.INSERT], "d": [Op.DELETE], "u": [Op.UPDATE_DELETE, Op.UPDATE_INSERT]}
MIGRATION_POINTS = ("migrate_before_switch", "migrate_staged", "migrate_before_epoch", "migrate_after_epoch")


@dataclass
class Side:
    """One instance, and what the model knows of its reader."""

    writer: KvLogStoreWriter
    reader: KvLogStoreReader
    vnodes: VnodeBitmap
    first: int
    needs: int
    paused: bool = False
    largest: tuple[int, int] = (0, 0)
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
        number=st.integers(0, 2),
        max_rows=st.sampled_from([0, 6, 1000]),
        max_bytes=st.sampled_from([400, 1 << 20]),
        stage=st.sampled_from([200, 2000, 1 << 20]),
    )
    def start(self, number: int, max_rows: int, max_bytes: int, stage: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-log-"))
        self.location = f"memory://{uuid.uuid4()}" if self.engine == "memory" else str(self.folder / "store")
        self.stage = stage
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.stores: list[StateStore] = []
        self.factory: KvLogStoreFactory | None = None
        self.sides: list[Side] = []
        self.remote: LogConsumer | None = None
        self.remote_rows = dict.fromkeys(range(VNODES), 0)
        self.remote_seen = 0
        self.model = Model()
        self.rows = dict.fromkeys(range(VNODES), 0)
        self.ended = dict.fromkeys(range(VNODES), 0)
        self.handed = (dict(self.rows), dict(self.ended))
        self.durable = (dict(self.rows), dict(self.ended))
        self.cursor = dict(self.rows)
        self.stored: set[int] = set()
        self.flags: dict[int, bool] = {}
        self.width = self.durable_width = 0
        self.widths: dict[int, int] = {}
        self.committed = self.flushed = self.newest_end = self.names = 0
        self.seen: dict[int, StoragePlace] = {}
        self.pins: dict[str, tuple[int, dict[int, list[Row]]]] = {}
        self.migration: Migration | None = None
        self.is_migrated = False
        self.compactions: list[Ranges] = []
        self.fully_compacted: tuple[int, Ranges] | None = None
        self.trace = []
        if self.traces is not None:
            self.traces.append(self.trace)
        self._take_over()
        self._begin(LAYOUTS[number], 1)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        dead, self.stores = self.stores, [open_writer(self.location, takeover=bool(self.stores))]
        if self.factory is not None:
            self.factory.close()
        for store in dead:
            store.close()
        self.factory = KvLogStoreFactory(self.stores[-1], stage_bytes=self.stage)

    def _begin(self, bitmaps: tuple[VnodeBitmap, ...], at: int) -> None:
        self.sides = [self._side(vnodes, at) for vnodes in bitmaps]
        self.now = at

    def _side(self, vnodes: VnodeBitmap, at: int) -> Side:
        assert self.factory is not None
        log = self.factory.log("t", schema_of(self.width), KEY, self.log_format, VNODES)
        reader, writer = self.factory.pair(
            log, "sink", vnodes, max_rows=self.max_rows, max_bytes=self.max_bytes, sleep=lambda _: None
        )
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

    def _can_read(self, side: Side) -> bool:
        return not side.paused and self.committed >= side.needs

    # -- writing -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), rows=ROWS)
    def write(self, which: int, rows: list[tuple[int, str]]) -> None:
        side = self._pick(which)
        if side.paused:
            return
        ids: list[int] = []
        ops: list[Op] = []
        for key, kind in rows:
            ops += OPS[kind]
            ids += [key] * len(OPS[kind])
        names = [f"r{self.names + place:06d}" for place in range(len(ids))]
        self.names += len(ids)
        more = [pa.array(ids, pa.int64())] * self.width
        schema = schema_of(self.width)
        batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names), *more], schema=schema)
        chunk = Chunk.build(batch, ops, KEY, VNODES).filter_vnodes(side.vnodes)
        side.writer.write_chunk(chunk)
        side.largest = (max(side.largest[0], chunk.num_rows), max(side.largest[1], chunk.nbytes))
        side.epoch_rows += chunk.num_rows
        self.widths[self.now] = self.width
        columns = (chunk.vnodes, chunk.rows.column("name"), chunk.rows.column("id"), chunk.ops)
        for vnode, name, key, op in zip(*(column.to_pylist() for column in columns), strict=True):
            self.model.add(vnode, Row(self.now, name, key, op))
        self.trace.append(("write", chunk.num_rows))

    def _flush(self, following: int, checkpoint: bool, options: list[dict[str, Any]]) -> None:
        ended = self.now
        for side, more in zip(self.sides, options, strict=True):
            if not side.paused or side.epoch_rows:
                self.stored.add(ended)
            self.newest_end = ended
            side.epoch_rows = 0
            chosen = FlushOptions(checkpoint, **more)
            if chosen.drain_seconds == 0:
                with pytest.raises(DrainTimeout):
                    side.writer.flush_current_epoch(epoch(following), chosen)
                self._hand_over(side, ended)
            else:
                reading = threading.Thread(target=self._deliver_barrier, args=(side,))
                if chosen.drain_seconds is not None:
                    reading.start()
                flush = side.writer.flush_current_epoch(epoch(following), chosen)
                self._hand_over(side, ended)
                if chosen.drain_seconds is not None:
                    reading.join()
                    self._drained(side, ended)
                flush.finish()
                if chosen.new_vnode_bitmap is not None or chosen.is_stop:
                    self._hand_over(side, following)
            side.live.add(ended)
        self.flags[ended] = checkpoint
        self.flushed, self.now = ended, following
        self.trace.append(("flush", ended, checkpoint))

    def _deliver_barrier(self, side: Side) -> None:
        item = side.reader.next_item(30.0)
        assert isinstance(item, BarrierItem)
        side.reader.truncate(item.offset)

    def _drained(self, side: Side, ended: int) -> None:
        side.last_barrier = ended
        counts = {vnode: self.cursor[vnode] for vnode in side.vnodes}
        side.queue.append((ended, counts, True, side.vnodes))
        self._hand_over(side, ended + 1)
        for vnode in side.vnodes:
            self.rows[vnode] = self.cursor[vnode]
            self.ended[vnode] = ended

    @rule(skip=st.integers(1, 2), checkpoint=st.booleans(), seal=st.booleans(), in_vain=st.sampled_from([0, 0, 0, 1]))
    def flush(self, skip: int, checkpoint: bool, seal: bool, in_vain: int = 0) -> None:
        """The end of an epoch; *in_vain*: with a drain that the reader does not follow."""
        drain = {"drain_seconds": 0.0} if in_vain else {}
        self._flush(self.now + skip, checkpoint, [dict(drain) for _ in self.sides])
        if seal:
            self.seal()

    @rule(
        times=st.integers(1, 3),
        rows=st.lists(ROWS, min_size=2, max_size=2),
        checkpoint=st.booleans(),
        seal=st.booleans(),
        taken=st.integers(0, 4),
    )
    def epochs(self, times: int, rows: list[list[tuple[int, str]]], checkpoint: bool, seal: bool, taken: int) -> None:
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
        self._sealed()

    def _sealed(self) -> None:
        self.durable = (dict(self.handed[0]), dict(self.handed[1]))
        self.durable_width = self.width
        with self.stores[-1].snapshot() as view:
            shown = LogView.open(view, "t")
            if self.compactions:
                self.model.compacted(shown, self.committed, self.compactions)
            if self.fully_compacted is not None:
                self.model.fully_compacted(shown, *self.fully_compacted)
            self.compactions, self.fully_compacted = [], None
            if self.is_migrated:
                assert {number for end in shown.epochs() for number in end.formats.numbers} <= {2}
                rows = layout.prefix(shown.log.number) + bytes((layout.ROWS,))
                assert not list(view.scan_prefix(rows))
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

    @precondition(lambda self: self.width < 3)
    @rule(drain=st.booleans(), seal=st.booleans())
    def change_schema(self, drain: bool, seal: bool) -> None:
        """One more column from the next epoch on; when drained, all that came before is delivered first."""
        if drain and not all(self._can_read(side) for side in self.sides):
            return
        change: dict[str, Any] = {"schema_change": schema_of(self.width + 1)}
        if drain:
            for which in range(len(self.sides)):
                self.read(which, 1 << 20)
                self.truncate(which, -1)
            change["drain_seconds"] = 30.0
        self._flush(self.now + 1, True, [dict(change) for _ in self.sides])
        self.width += 1
        self.trace.append(("schema", self.width))
        if seal:
            self.seal()

    @rule(which=st.integers(0, 1))
    def pause_or_resume(self, which: int) -> None:
        side = self._pick(which)
        side.writer.resume() if side.paused else side.writer.pause()
        side.paused = not side.paused
        self.trace.append(("paused", side.paused))

    @rule(number=st.integers(0, 2), skip=st.integers(1, 3), tool=st.sampled_from(["", "", "compact", "migrate"]))
    def crash(self, number: int, skip: int, tool: str) -> None:
        """The process dies; another takes over, and writes the epochs that vanished with other rows.

        In between somebody may use a tool on the store that nothing writes.
        """
        self.rows, self.ended = dict(self.durable[0]), dict(self.durable[1])
        self.handed = (dict(self.rows), dict(self.ended))
        self.model.forget_after(self.committed)
        self.stored = {number for number in self.stored if number <= self.committed}
        self.widths = {number: width for number, width in self.widths.items() if number <= self.committed}
        self.width = self.durable_width
        self.flushed, self.newest_end = self.committed, 0
        self.seen = {}
        self.sides = []
        self.migration, self.is_migrated, self.compactions, self.fully_compacted = None, False, [], None
        self._take_over()
        if tool and self.committed:
            self._run(tool)
        self._begin(LAYOUTS[number], self.committed + skip)
        self.trace.append(("crash", number, tool))

    # -- migration and compaction --------------------------------------------------------------------------------

    def _run(self, tool: str) -> None:
        """A tool's step on a store that nothing writes, and its seal."""
        done = self._migrate(2) if tool == "migrate" else self._compact(1_000_000)
        assert self.factory is not None
        if self.committed:
            self.committed = self.flushed = self.committed + 1
            self.factory.sealer.seal(epoch(self.committed))
            self._sealed()
        self.trace.append((tool, done))

    def _migrate(self, max_epochs: int) -> bool:
        assert self.factory is not None
        self.migration = self.migration or Migration(self.factory, "t", stage_bytes=self.stage)
        done = self.migration.step(max_epochs)
        self.is_migrated = self.is_migrated or done
        return done

    @rule(max_epochs=st.integers(0, 3), seal=st.booleans(), anew=st.booleans())
    def migrate(self, max_epochs: int, seal: bool, anew: bool) -> None:
        """A step on the way to format 2, at any place of an epoch."""
        if anew:
            self.migration = None
        self.trace.append(("migrate", self._migrate(max_epochs)))
        if seal:
            self.flush(1, True, True)

    @rule(point=st.sampled_from(MIGRATION_POINTS), hit=st.integers(1, 3), goes_on=st.booleans())
    def fail_in_migration(self, point: str, hit: int, goes_on: bool) -> None:
        """A step ends half-way; the process dies of it, or goes on."""
        failpoints.arm(f"log_store.{point}=raise@{hit}")
        try:
            self._migrate(3)
            failed = False
        except failpoints.FailpointError:
            failed = True
        finally:
            failpoints.arm("")
        self.trace.append(("failed migration", point, failed))
        if not goes_on:
            self.crash(0, 1, "")

    def _left_alone(self) -> Ranges:
        """The epochs ``(low, high]`` that no compaction may touch."""
        ranges = [(0, number) for number, _ in self.pins.values()]
        rows, ended = self.handed
        delivered = min(ended.values())
        if self.sides:
            ranges.append((delivered, ALWAYS))
        begun = [self.model.log[vnode][count - 1].epoch for vnode, count in rows.items() if count]
        ranges.append((delivered, max(*ended.values(), *begun, 0)))
        if self.remote is not None:
            places = [place.epoch.ms for _, place in self.remote.progress.places()]
            ranges.append((self.remote.delivered().ms, max(places, default=0)))
        return ranges

    def _compact(self, max_rows: int) -> bool:
        assert self.factory is not None
        compaction = Compaction(self.factory, "t")
        if self.factory.existing("t").rows_held:
            with pytest.raises(WrongCall):
                compaction.step(max_rows)
            return False
        done = False
        for _ in range(2):
            left_alone = self._left_alone()
            self.fully_compacted = None if self.compactions else (self.committed, left_alone)
            self.compactions.append(left_alone)
            done = compaction.step(max_rows)
            if done:
                break
            self.fully_compacted = None
        return done

    @precondition(lambda self: self.committed > 0)
    @rule(max_rows=st.sampled_from([1, 10, 1_000_000]), seal=st.booleans())
    def compact(self, max_rows: int, seal: bool) -> None:
        done = self._compact(max_rows)
        if max_rows < 1_000_000:
            self.fully_compacted = None
        self.trace.append(("compact", done))
        if seal:
            self.flush(1, True, True)

    @rule(
        rows=st.lists(ROWS, min_size=2, max_size=2),
        times=st.integers(1, 4),
        max_rows=st.sampled_from([5, 1_000_000]),
        crash=st.sampled_from(["", "", "before", "after"]),
    )
    def compact_a_backlog(self, rows: list[list[tuple[int, str]]], times: int, max_rows: int, crash: str) -> None:
        """Epochs that the readers of this process have delivered, and the other consumer has not."""
        self.flush(1, True, True)
        if self.remote is None:
            self.read_elsewhere(False, "no")
        self.epochs(times, rows, True, True, 0)
        for which in range(len(self.sides)):
            self.deliver(which, 1 << 20, -1)
        self.flush(1, True, crash != "before")
        self.compact(max_rows, seal=crash == "")
        if crash:
            self.crash(0, 1, "compact" if crash == "after" else "")
        self.read_elsewhere(False, "no")

    @rule(
        rows=st.lists(ROWS, min_size=2, max_size=2),
        times=st.integers(1, 4),
        steps=st.integers(1, 4),
        point=st.sampled_from(["", "", *MIGRATION_POINTS]),
    )
    def migrate_a_backlog(self, rows: list[list[tuple[int, str]]], times: int, steps: int, point: str) -> None:
        """A step at each barrier, while rows are written and read; the process may die in one of them."""
        self.epochs(times, rows, True, True, 0)
        for step in range(steps):
            if point and step == steps // 2:
                self.fail_in_migration(point, 1, False)
            self.migrate(1, False, False)
            self.epochs(1, rows, True, True, 1)

    # -- reading -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), times=st.integers(1, 6))
    def read(self, which: int, times: int) -> None:
        side = self._pick(which)
        for _ in range(times):
            item = side.reader.next_item(0.0)
            barrier = self._next_barrier(side)
            if not self._can_read(side):
                assert item is None
                return
            side.needs = 0
            following = {vnode: self.model.skip(vnode, self.cursor[vnode]) for vnode in side.vnodes}
            if item is None:
                assert barrier is None
                assert all(place == len(self.model.log[vnode]) for vnode, place in following.items())
                return
            number = item.epoch.ms
            assert number == (self.now if barrier is None else barrier)
            if isinstance(item, ChunkItem):
                self._check_chunk(side, number, item.chunk)
            else:
                assert item.is_checkpoint == self.flags[number]
                side.last_barrier = number
                for vnode, place in following.items():
                    assert place >= self.model.end(vnode, number), "all rows come before their barrier"
                self.trace.append(("barrier", number))
            counts = {vnode: self.cursor[vnode] for vnode in side.vnodes}
            side.yielded.append((item.offset, number, counts, isinstance(item, BarrierItem)))

    def _check_chunk(self, side: Side, number: int, chunk: Chunk) -> None:
        assert chunk.num_rows
        assert chunk.schema == schema_of(self.widths[number])
        columns = (chunk.vnodes, chunk.rows.column("name"), chunk.rows.column("id"), chunk.ops)
        for vnode, name, key, op in zip(*(column.to_pylist() for column in columns), strict=True):
            assert vnode in side.vnodes
            place = self.model.skip(vnode, self.cursor[vnode])
            assert self.model.log[vnode][place] == (number, name, key, op)
            self.cursor[vnode] = place + 1
            self.trace.append((number, vnode, name, op))

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
        self.trace.append(("truncate", place))

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
        self.trace.append(("rewind", which))

    # -- pins, and a consumer of another process -----------------------------------------------------------------

    @precondition(lambda self: self.committed > 0)
    @rule(name=st.sampled_from("ab"))
    def pin_or_unpin(self, name: str) -> None:
        store = self.stores[-1]
        if name in self.pins:
            number, rows = self.pins.pop(name)
            with store.snapshot(epoch(number)) as view:
                assert shown_rows(LogView.open(view, "t"), number) == rows, "a pin shows what it showed"
            store.unpin(name)
        else:
            store.pin(name)
            with store.snapshot() as view:
                self.pins[name] = (self.committed, shown_rows(LogView.open(view, "t"), self.committed))
        self.trace.append(("pins", sorted(self.pins)))

    @precondition(lambda self: self.committed > 0)
    @rule(restart=st.booleans(), commit=st.sampled_from(["no", "all", "even"]))
    def read_elsewhere(self, restart: bool, commit: str) -> None:
        if self.remote is None or restart:
            dead = self.remote
            self.remote = LogConsumer.open(self.location, "t", "mirror", takeover=dead is not None)
            if dead is not None:
                dead.close()
            else:
                self._remote_is_at(self.remote.delivered().ms)
        after, upto = self.remote.wait(0.0)
        assert upto == epoch(self.committed) or after == upto
        found = rows_in(self.remote.read(after, upto))
        for vnode, rows in found.items():
            assert rows == self.model.rows(vnode, self.remote_rows[vnode], self.committed)
        if commit != "no" and upto > after:
            vnodes = VnodeBitmap.of(range(0, VNODES, 2), VNODES) if commit == "even" else FULL
            self.remote.commit(upto, vnodes)
            for vnode in vnodes:
                self.remote_rows[vnode] = self.model.end(vnode, self.committed)
        self.trace.append(("elsewhere", commit, found))

    @precondition(lambda self: self.remote is not None)
    @rule(number=st.integers(0, 30))
    def rewind_elsewhere(self, number: int) -> None:
        """The other consumer goes back to an epoch that the log keeps."""
        assert self.remote is not None
        with self.stores[-1].snapshot() as view:
            oldest = announced(view, "t").ms
        number = min(number, self.committed)
        if number < oldest:
            with pytest.raises(EpochGone):
                self.remote.rewind(epoch(number))
            return
        self.remote.rewind(epoch(number))
        self._remote_is_at(number)
        self.trace.append(("rewind elsewhere", number))

    def _remote_is_at(self, number: int) -> None:
        self.remote_rows = {vnode: self.model.end(vnode, number) for vnode in range(VNODES)}
        self.remote_seen = number

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
        for vnode, rows in rows_in(runs[0], bitmap).items():
            assert rows == self.model.rows(vnode, self.model.end(vnode, after), upto)
        self.trace.append(("range", after, upto))

    # -- always ------------------------------------------------------------------------------------------------

    @invariant()
    def the_buffer_is_bounded(self) -> None:
        for side in self.sides:
            held = side.reader._buffer.statistics()
            assert held.rows <= (self.max_rows - 1 + side.largest[0] if self.max_rows else 0)
            assert held.bytes_held <= self.max_bytes - 1 + side.largest[1]

    @invariant()
    def progress_never_goes_back(self) -> None:
        if self.factory is None:
            return
        for consumer in self.factory.consumers.of("t"):
            for vnode, place in consumer.progress.places():
                assert vnode not in self.seen or place >= self.seen[vnode]
                self.seen[vnode] = place
        if self.remote is not None:
            assert self.remote.delivered().ms >= self.remote_seen
            self.remote_seen = self.remote.delivered().ms

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
        for name in memory_names():
            if f"memory://{name}".startswith(self.location):
                drop_memory_store(name)
        shutil.rmtree(self.folder, ignore_errors=True)


def machine(engine: str, log_format: int, traces: list[list[Any]] | None = None) -> type[LogMachine]:
    return type("Machine", (LogMachine,), {"engine": engine, "log_format": log_format, "traces": traces})


@pytest.mark.timeout(3600 if "HEADWATER_SOAK" in os.environ else 300)
@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(("engine", "examples"), [("memory", 40), ("embedded", 10)])
def test_m21_a_log_does_what_the_model_says(engine: str, examples: int, log_format: int) -> None:
    run_state_machine_as_test(
        machine(engine, log_format),
        settings=settings(
            max_examples=examples * (40 if "HEADWATER_SOAK" in os.environ else 1),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("number", [1, 2])
def test_the_same_seed_gives_the_same_trace_whatever_the_engine(number: int) -> None:
    runs: list[list[list[Any]]] = []
    for engine in ("memory", "memory", "embedded"):
        traces: list[list[Any]] = []
        run_state_machine_as_test(
            seed(number)(machine(engine, 1, traces)),
            settings=settings(
                max_examples=5, stateful_step_count=30, database=None, suppress_health_check=list(HealthCheck)
            ),
        )
        runs.append(traces)
    assert runs[0] == runs[1] == runs[2]
    assert sum(map(len, runs[0])) > 100
