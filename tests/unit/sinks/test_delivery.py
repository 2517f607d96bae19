"""Which barriers commit, and what is truncated when."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from headwater.log_store import BarrierItem, ChunkItem, LogClosed, LogItem, LogOffset
from headwater.log_store.testing import SCHEMA, epoch, numbered_chunk
from headwater.sinks import AsyncDelivery, CheckpointDelivery, Ended, SinkControl, SinkInputError
from headwater.stream import Chunk, Epoch, VnodeBitmap

IDLE = None


class Items:
    """A reader of given items; ``None`` is a time in which nothing came. Then the writer has stopped."""

    def __init__(self, *items: LogItem | None) -> None:
        self.items = deque(items)
        self.truncated: list[LogOffset] = []

    def init(self, timeout: float | None = None) -> None: ...

    def start_from(self, after: Epoch | None = None) -> None: ...

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        if not self.items:
            raise LogClosed("The writer of this log has ended.")
        return self.items.popleft()

    def truncate(self, offset: LogOffset) -> None:
        self.truncated.append(offset)

    def rewind(self) -> float:
        return 0.0

    def close(self) -> None: ...


class Calls:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, epoch: Epoch, chunk: Chunk) -> None:
        self.calls.append(f"write {epoch.ms}")

    def barrier(self, epoch: Epoch, is_checkpoint: bool) -> None:
        self.calls.append(f"{'commit' if is_checkpoint else 'end'} {epoch.ms}")

    def abort(self) -> None:
        self.calls.append("abort")


def chunk(number: int, chunk_id: int = 0) -> ChunkItem:
    return ChunkItem(epoch(number), chunk_id, numbered_chunk(0, 3))


def barrier(number: int, checkpoint: bool = True, **options: Any) -> BarrierItem:
    return BarrierItem(epoch(number), checkpoint, **options)


def run(interval: int, *items: LogItem | None, idle: float = 99.0) -> tuple[list[str], list[int]]:
    sink, reader = Calls(), Items(*items)
    assert CheckpointDelivery(sink, interval, idle_seconds=idle).run(reader, SinkControl()) is Ended.STOPPED
    return sink.calls, [offset.epoch.ms for offset in reader.truncated]


def test_each_checkpoint_commits_and_other_barriers_do_not() -> None:
    items = (chunk(1), barrier(1, False), chunk(2), barrier(2), barrier(3), barrier(4, False))
    calls, truncated = run(1, *items)
    assert calls == ["write 1", "end 1", "write 2", "commit 2", "commit 3", "end 4"]
    assert truncated == [2, 3]


def test_each_third_checkpoint_commits() -> None:
    items = [item for number in range(1, 9) for item in (chunk(number), barrier(number))]
    calls, truncated = run(3, *items, chunk(9))
    assert [call for call in calls if "write" not in call] == [
        "end 1",
        "end 2",
        "commit 3",
        "end 4",
        "end 5",
        "commit 6",
        "end 7",
        "end 8",
    ]
    assert truncated == [3, 6]
    assert run(3, *items)[1] == [3, 6, 8], "what is whole when the writer stops is committed"
    with pytest.raises(SinkInputError):
        CheckpointDelivery(Calls(), 0)


@pytest.mark.parametrize(("moves", "stops", "changes"), list(product([False, True], repeat=3)))
@pytest.mark.parametrize("checkpoint", [False, True])
def test_45_what_forces_a_commit(checkpoint: bool, moves: bool, stops: bool, changes: bool) -> None:
    bitmap = VnodeBitmap.full(256) if moves else None
    schema: pa.Schema | None = SCHEMA if changes else None
    forcing = barrier(1, checkpoint, is_stop=stops, new_vnode_bitmap=bitmap, schema_change=schema)
    calls, truncated = run(10, forcing, *([] if stops else [chunk(2)]))
    committed = checkpoint and (moves or stops or changes)
    assert calls[0] == ("commit 1" if committed else "end 1")
    assert truncated == ([1] if committed else [])


def test_45_a_forced_commit_begins_the_count_anew() -> None:
    bitmap = VnodeBitmap.full(256)
    items = (barrier(1), barrier(2, new_vnode_bitmap=bitmap), barrier(3), barrier(4), barrier(5), chunk(6))
    assert run(3, *items)[1] == [2, 5]


def test_45_a_checkpoint_after_which_nothing_comes_commits_so_that_a_drain_ends() -> None:
    calls, truncated = run(10, chunk(1), barrier(1), IDLE, IDLE, chunk(2), IDLE, chunk(2, 1), idle=0.0)
    assert calls == ["write 1", "commit 1", "write 2", "write 2"], (
        "an epoch ends once, and a part of one is not committed"
    )
    assert truncated == [1]
    assert run(10, barrier(1), barrier(2, False), IDLE, chunk(3), idle=0.0)[1] == [], "not after another epoch began"
    assert run(10, barrier(1), IDLE, chunk(2), idle=99.0)[1] == [], "not before its time"


def test_a_request_ends_the_delivery_between_two_items() -> None:
    control, sink = SinkControl(), Calls()
    control.stop()
    reader = Items(chunk(1))
    assert CheckpointDelivery(sink).run(reader, control) is Ended.ASKED
    assert AsyncDelivery(Deferred(), 2).run(reader, control) is Ended.ASKED
    assert (sink.calls, len(reader.items)) == ([], 1)


class Deferred(Calls):
    """Deliveries that finish when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[Future[None]] = []

    def write(self, epoch: Epoch, chunk: Chunk) -> Future[None]:  # type: ignore[override]
        super().write(epoch, chunk)
        self.futures.append(Future())
        return self.futures[-1]


def test_asynchronous_deliveries_are_truncated_in_order_as_they_finish() -> None:
    sink = Deferred()
    delivery = AsyncDelivery(sink, 10)
    control = SinkControl()

    class Script(Items):
        def next_item(self, timeout: float | None = None) -> LogItem | None:
            if len(self.items) == 2:
                sink.futures[1].set_result(None)
            if len(self.items) == 1:
                assert self.truncated == [], "the first is not delivered yet"
                sink.futures[0].set_result(None)
            if not self.items:
                assert self.truncated == [LogOffset(epoch(1))]
                sink.futures[2].set_result(None)
            return super().next_item(timeout)

    reader = Script(chunk(1, 0), chunk(1, 1), barrier(1), chunk(2, 0), IDLE)
    assert delivery.run(reader, control) is Ended.STOPPED
    assert reader.truncated[1:] == [LogOffset(epoch(2), 0)]
    delivery.abort()
    assert sink.calls == ["write 1", "write 1", "commit 1", "write 2", "abort"]


def test_a_stop_waits_for_the_deliveries_under_way_and_a_failed_one_is_raised() -> None:
    class Done(Calls):
        def write(self, epoch: Epoch, chunk: Chunk) -> Future[None]:  # type: ignore[override]
            future: Future[None] = Future()
            if epoch.ms == 3:
                future.set_exception(OSError("refused"))
            else:
                future.set_result(None)
            return future

    reader = Items(chunk(1), barrier(1), chunk(2), barrier(2, is_stop=True), chunk(3))
    assert AsyncDelivery(Done(), 2).run(reader, SinkControl()) is Ended.STOPPED
    assert reader.truncated[-1] == LogOffset(epoch(2))
    with pytest.raises(OSError, match="refused"):
        AsyncDelivery(Done(), 2).run(reader, SinkControl())
