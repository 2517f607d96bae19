"""Rate-limited readers over a real log: random rates, pauses, rewinds and moves of vnodes.

Every row has a name of its own. Whatever happens, the rows of a vnode come in the order in which they were written,
from the first that was not truncated on and each once until the next rewind or move; what is truncated is a prefix of
what was written; update pairs come whole; and in the end everything was delivered and truncated.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from headwater.log_store import KvLogStoreFactory, KvLogStoreReader, KvLogStoreWriter, LogOffset
from headwater.log_store.errors import InvalidOffset
from headwater.log_store.item import ChunkItem, LogItem
from headwater.log_store.rate_limit import RateLimitedReader
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.log_store.writer import FlushOptions
from headwater.state import open_writer
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap

VNODES = 8
LAYOUTS = tuple(
    (mine, ~mine) for mine in (VnodeBitmap.of(owned, VNODES) for owned in ((0, 1, 2, 3), (1, 3, 5, 7), (0, 4, 5, 6)))
)
ROWS = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=12)
RATES = st.sampled_from([3, 2, 1, 7, None, 0])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None) -> None:
        assert seconds is not None
        self.now += seconds


@dataclass
class Watched:
    """The reader of the log, and the rows that it was told to forget."""

    reader: KvLogStoreReader
    done: dict[int, list[str]]
    handed: list[tuple[LogOffset, list[tuple[int, str]]]] = field(default_factory=list)

    def init(self, timeout: float | None = None) -> None:
        self.reader.init(5)
        self.handed.clear()

    def start_from(self, after: Epoch | None = None) -> None:
        self.reader.start_from(after)

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        item = self.reader.next_item(0)
        if item is not None:
            self.handed.append((item.offset, named(item.chunk) if isinstance(item, ChunkItem) else []))
        return item

    def truncate(self, offset: LogOffset) -> None:
        self.reader.truncate(offset)
        while self.handed and self.handed[0][0] <= offset:
            for vnode, name in self.handed.pop(0)[1]:
                self.done[vnode].append(name)

    def rewind(self) -> float:
        self.handed.clear()
        return self.reader.rewind()

    def close(self) -> None:
        self.reader.close()


@dataclass
class Side:
    writer: KvLogStoreWriter
    watched: Watched
    limited: RateLimitedReader
    vnodes: VnodeBitmap
    delivered: list[tuple[LogOffset, list[tuple[int, str]]]] = field(default_factory=list)


def named(chunk: Chunk) -> list[tuple[int, str]]:
    return list(zip(chunk.vnodes.to_pylist(), chunk.rows.column("name").to_pylist(), strict=True))


class RateMachine(RuleBasedStateMachine):
    log_format = 2

    @initialize(layout=st.sampled_from(LAYOUTS), max_rows=st.sampled_from([0, 10, 1000]), rate=RATES)
    def start(self, layout: tuple[VnodeBitmap, ...], max_rows: int, rate: int | None) -> None:
        self.store = open_writer(f"memory://{uuid.uuid4()}")
        self.factory = KvLogStoreFactory(self.store)
        log = self.factory.log("t", SCHEMA, KEY, self.log_format, VNODES)
        self.written: dict[int, list[str]] = {vnode: [] for vnode in range(VNODES)}
        self.done: dict[int, list[str]] = {vnode: [] for vnode in range(VNODES)}
        self.cursor = dict.fromkeys(range(VNODES), 0)
        self.now, self.names = 1, 0
        self.clock = Clock()
        self.sides: list[Side] = []
        for vnodes in layout:
            reader, writer = self.factory.pair(log, "sink", vnodes, max_rows=max_rows, sleep=lambda _: None)
            writer.init(EpochPair(epoch(1), Epoch(0)))
            watched = Watched(reader, self.done)
            limited = RateLimitedReader(watched, rate, clock=self.clock, wait=self.clock.wait)
            limited.init()
            limited.start_from()
            self.sides.append(Side(writer, watched, limited, vnodes))

    @rule(rows=ROWS)
    def write(self, rows: list[tuple[int, bool]]) -> None:
        ids: list[int] = []
        ops: list[Op] = []
        for key, is_pair in rows:
            ids += [key, key] if is_pair else [key]
            ops += [Op.UPDATE_DELETE, Op.UPDATE_INSERT] if is_pair else [Op.INSERT]
        names = [str(self.names + place) for place in range(len(ids))]
        self.names += len(ids)
        batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names)], schema=SCHEMA)
        chunk = Chunk.build(batch, ops, KEY, VNODES)
        for vnode, name in named(chunk):
            self.written[vnode].append(name)
        for side in self.sides:
            side.writer.write_chunk(chunk.filter_vnodes(side.vnodes))

    @rule(checkpoint=st.booleans())
    def barrier(self, checkpoint: bool) -> None:
        self._flush([FlushOptions(is_checkpoint=checkpoint)] * 2)

    @rule(layout=st.sampled_from(LAYOUTS))
    def move(self, layout: tuple[VnodeBitmap, ...]) -> None:
        self._flush([FlushOptions(new_vnode_bitmap=vnodes) for vnodes in layout])
        for side, vnodes in zip(self.sides, layout, strict=True):
            stale = [offset for offset, _ in side.delivered]
            side.vnodes = vnodes
            side.limited.init()
            self._begin(side)
            if stale:
                with pytest.raises(InvalidOffset):
                    side.limited.truncate(stale[-1])

    def _flush(self, options: list[FlushOptions]) -> None:
        ended, self.now = self.now, self.now + 1
        flushes = [
            side.writer.flush_current_epoch(epoch(self.now), chosen)
            for side, chosen in zip(self.sides, options, strict=True)
        ]
        for flush in flushes:
            flush.finish()
        if options[0].is_checkpoint:
            self.factory.sealer.seal(epoch(ended))

    @rule(number=st.integers(0, 1), rate=RATES)
    def change_rate(self, number: int, rate: int | None) -> None:
        self.sides[number].limited.set_rate(rate)

    @rule(number=st.integers(0, 1), count=st.integers(1, 9), seconds=st.sampled_from([0.0, 0.3, 10.0]))
    def read(self, number: int, count: int, seconds: float) -> None:
        for _ in range(count):
            self._read(self.sides[number], seconds)

    def _read(self, side: Side, seconds: float) -> bool:
        item = side.limited.next_item(seconds)
        if item is None:
            return False
        rows: list[tuple[int, str]] = []
        if isinstance(item, ChunkItem):
            rate = side.limited.rows_per_second
            assert rate != 0
            assert rate is None or item.chunk.num_rows <= rate + 1
            rows = named(item.chunk)  # made by a Chunk that refuses half a pair
            codes = item.chunk.ops.to_pylist()
            assert codes[-1] != Op.UPDATE_DELETE
            assert codes.count(Op.UPDATE_DELETE) == codes.count(Op.UPDATE_INSERT)
        for vnode, name in rows:
            assert name == self.written[vnode][self.cursor[vnode]], "lost, doubled, or out of order"
            self.cursor[vnode] += 1
        side.delivered.append((item.offset, rows))
        return True

    @rule(number=st.integers(0, 1), fraction=st.floats(0, 1))
    def truncate(self, number: int, fraction: float) -> None:
        delivered = self.sides[number].delivered
        if delivered:
            place = int(fraction * (len(delivered) - 1))
            self.sides[number].limited.truncate(delivered[place][0])
            untruncated = {name for _, rows in delivered[place + 1 :] for _, name in rows}
            del delivered[: place + 1]
            told = {name for names in self.done.values() for name in names}
            assert not told & untruncated, "a chunk was truncated before all its pieces were"
            for vnode, names in self.done.items():
                assert names == self.written[vnode][: len(names)], "not a prefix of what was written"

    @rule(number=st.integers(0, 1))
    def rewind(self, number: int) -> None:
        side = self.sides[number]
        side.limited.rewind()
        self._begin(side)

    def _begin(self, side: Side) -> None:
        side.limited.start_from()
        side.delivered.clear()
        for vnode in side.vnodes:
            self.cursor[vnode] = len(self.done[vnode])

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        self._flush([FlushOptions()] * 2)
        for side in self.sides:
            side.limited.set_rate(5)
            while self._read(side, 100.0):
                pass
            if side.delivered:
                assert side.delivered[-1][0].is_barrier
                side.limited.truncate(side.delivered[-1][0])
        assert self.done == self.written
        self.factory.close()
        self.store.close()


@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
def test_m3_nothing_is_lost_and_nothing_truncated_comes_again(log_format: int) -> None:
    class Machine(RateMachine):
        pass

    Machine.log_format = log_format
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
