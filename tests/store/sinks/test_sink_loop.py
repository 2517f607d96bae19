"""The life of a sink over a real log: errors, other settings, other vnodes, crashes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tests.store.sinks.tools import Outside, Pipe

from headwater.errors import FencedError
from headwater.log_store import FlushOptions, LogClosed, LogOffset
from headwater.log_store.in_mem import InMemLogStoreFactory
from headwater.log_store.protocols import LogReader
from headwater.log_store.rate_limit import RateLimitedReader
from headwater.log_store.testing import KEY, SCHEMA, epoch, numbered_chunk, rows_of
from headwater.sinks import (
    AsyncDelivery,
    NotRewindable,
    SinkControl,
    SinkFailure,
    SinkLoop,
    SinkPhase,
)
from headwater.state import StateStore
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap

Reopen = Callable[[], StateStore]
EVEN = VnodeBitmap.of(range(0, 256, 2), 256)
ODD = ~EVEN


def written(pipe: Pipe, epochs: int, rows: int = 20, **last: Any) -> list[tuple[int, int, str]]:
    """Some epochs of inserts, the last of which stops the writer."""
    chunks = [numbered_chunk(100 * number, rows) for number in range(1, epochs + 1)]
    for number, chunk in enumerate(chunks, 1):
        pipe.write(number + 1, chunk, **({"is_stop": True, **last} if number == epochs else {}))
    return rows_of(chunks)


def updating(control: SinkControl, **settings: str | None) -> Callable[[Epoch, Chunk], None]:
    """Settings that arrive while the sink writes."""

    def update(at: Epoch, chunk: Chunk) -> None:
        control.update(settings)

    return update


class Failing:
    """Fails at given calls."""

    def __init__(self, *numbers: int, error: Callable[[], Exception] = lambda: OSError("no route")) -> None:
        self.numbers = set(numbers)
        self.error = error
        self.calls = 0

    def __call__(self, *arguments: object) -> None:
        self.calls += 1
        if self.calls in self.numbers:
            raise self.error()


# -- settings -------------------------------------------------------------------------------------------------------


def test_33_settings_that_change_nothing_keep_the_consumer(reopen: Reopen, log_format: int) -> None:
    pipe, outside = Pipe.open(reopen(), 1, log_format), Outside()
    rows = written(pipe, 3)
    control = SinkControl({"url": "a"})
    loop = pipe.loop(outside.build, control=control)
    outside.on_write = updating(control, url="a", missing=None)
    loop.run()
    assert (loop.status.rewinds, loop.status.starts, outside.starts) == (0, 1, [{"url": "a"}])
    assert sorted(outside.rows) == rows
    assert loop.status.phase is SinkPhase.ENDED


def in_memory(chunks: list[Chunk], errors: list[BaseException]) -> tuple[LogReader, threading.Thread]:
    """A log in memory, with a thread that writes *chunks* to it, an epoch each."""
    factory = InMemLogStoreFactory(wait_seconds=20)
    reader, writer = factory.pair(factory.log("orders", SCHEMA, KEY), "sink")

    def write() -> None:
        try:
            writer.init(EpochPair(curr=epoch(1), prev=Epoch(0)))
            for number, chunk in enumerate(chunks, 1):
                writer.write_chunk(chunk)
                stops = FlushOptions(is_stop=number == len(chunks))
                writer.flush_current_epoch(epoch(number + 1), stops).finish()
        except LogClosed as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    return reader, thread


def test_34_also_on_a_log_that_cannot_be_rewound() -> None:
    chunks, errors = [numbered_chunk(100 * number, 20) for number in range(3)], list[BaseException]()
    reader, thread = in_memory(chunks, errors)
    control, outside = SinkControl({"url": "a"}), Outside()
    outside.on_write = updating(control, url="a")
    loop = SinkLoop(reader, outside.build, control, allow_rewind=InMemLogStoreFactory.ALLOW_REWIND)
    loop.run()
    thread.join(20)
    assert (loop.status.rewinds, loop.status.starts, errors) == (0, 1, [])
    assert sorted(outside.rows) == rows_of(chunks)


@pytest.mark.parametrize("max_rows", [0, 1000])
def test_35_other_settings_rewind_once_and_start_a_second_time(reopen: Reopen, log_format: int, max_rows: int) -> None:
    pipe, outside = Pipe.open(reopen(), 1, log_format, max_rows=max_rows), Outside()
    rows = written(pipe, 4)
    control = SinkControl({"url": "a", "user": "u"})
    seen: list[int] = []

    def update(at: Epoch, _: Chunk) -> None:
        seen.append(at.ms)
        if at == epoch(3):
            control.update({"url": "b"})

    outside.on_write = update
    loop = pipe.loop(outside.build, control=control)
    loop.run()
    assert (loop.status.rewinds, loop.status.failures) == (1, 0)
    assert outside.starts == [{"url": "a", "user": "u"}, {"url": "b", "user": "u"}]
    assert seen == [1, 2, 3, 3, 4], "what was not committed comes again"
    assert (sorted(outside.rows), outside.aborts) == (rows, 2)


def test_36_other_settings_on_a_log_that_cannot_be_rewound_are_an_error() -> None:
    errors: list[BaseException] = []
    reader, thread = in_memory([numbered_chunk(100 * number, 20) for number in range(3)], errors)
    control, outside = SinkControl({"url": "a"}), Outside()
    outside.on_write = updating(control, url="b")
    loop = SinkLoop(reader, outside.build, control, allow_rewind=InMemLogStoreFactory.ALLOW_REWIND)
    with pytest.raises(NotRewindable):
        loop.run()
    thread.join(20)
    assert (loop.status.rewinds, loop.status.starts, loop.status.phase) == (0, 1, SinkPhase.FAILED)
    assert len(errors) == 1, "the writer is told: it must begin again, too"
    assert outside.aborts == 1


@pytest.mark.parametrize("allow_rewind", [False, True])
def test_36_where_a_rewind_is_not_possible_the_first_error_is_raised(allow_rewind: bool) -> None:
    errors: list[BaseException] = []
    reader, thread = in_memory([numbered_chunk(0, 20)], errors)
    outside, told = Outside(before_commit=Failing(1)), list[SinkFailure]()
    loop = SinkLoop(reader, outside.build, allow_rewind=allow_rewind, on_failure=told.append)
    with pytest.raises(OSError, match="no route"):
        loop.run()
    thread.join(20)
    assert (loop.status.rewinds, loop.status.failures, len(told), len(errors)) == (0, 1, 1, 1)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_37_after_each_error_the_log_is_rewound_and_the_delay_grows(reopen: Reopen, log_format: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format)
    rows = written(pipe, 3)
    outside = Outside(before_commit=Failing(*range(2, 9), 10))
    now = [0.0]
    slept: list[float] = []
    told: list[SinkFailure] = []

    def live(*_: object) -> None:
        now[0] += 70.0 if len(told) == 7 else 0.5

    outside.on_write = live
    loop = pipe.loop(
        outside.build,
        jitter=lambda: 1.0,
        clock=lambda: now[0],
        sleep=slept.append,
        on_failure=told.append,
    )
    loop.run()
    assert slept == [1, 2, 4, 8, 16, 30, 30, 1], "one that lived for a minute begins anew"
    assert [failure.number for failure in told] == list(range(1, 9))
    status = loop.status
    assert (status.failures, status.rewinds, status.starts, outside.aborts) == (8, 8, 9, 9)
    assert status.backoff_seconds == sum(slept)
    assert sorted(outside.rows) == rows
    assert status.last_failure is told[-1]
    assert told[-1].summary == "OSError", "the text of a foreign error may hold row values"


def test_the_last_error_is_seen_also_if_it_cannot_be_reported(reopen: Reopen, caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe.open(reopen(), 1, 2)
    rows = written(pipe, 2)
    outside = Outside(before_commit=Failing(1, error=lambda: NotRewindable("It broke.", next_step="Mend it.")))
    loop = pipe.loop(outside.build, on_failure=Failing(1))
    loop.run()
    assert sorted(outside.rows) == rows
    assert loop.status.last_failure is not None
    assert loop.status.last_failure.summary == "NotRewindable: It broke. Mend it."
    assert "no route" not in caplog.text
    assert "could not be reported: OSError" in caplog.text


def test_a_sink_that_cannot_be_built_is_tried_again(reopen: Reopen) -> None:
    pipe, outside = Pipe.open(reopen(), 1, 2), Outside()
    rows = written(pipe, 2)
    fails = Failing(1, 2)

    def build(settings: Any) -> Any:
        fails()
        return outside.build(settings)

    loop = pipe.loop(build)
    loop.run()
    assert (loop.status.failures, loop.status.starts, loop.status.rewinds) == (2, 1, 2)
    assert sorted(outside.rows) == rows


def test_a_fenced_sink_ends(reopen: Reopen) -> None:
    pipe = Pipe.open(reopen(), 1, 2)
    written(pipe, 2)
    outside = Outside(before_commit=Failing(2, error=lambda: FencedError("Another process delivers.")))
    loop = pipe.loop(outside.build)
    with pytest.raises(FencedError):
        loop.run()
    assert (loop.status.rewinds, loop.status.failures, loop.status.phase) == (0, 1, SinkPhase.FAILED)
    assert outside.committed == [epoch(1)]


def test_an_error_in_the_midst_of_an_epoch_or_after_its_commit_doubles_nothing_for_a_sink_that_knows_epochs(
    reopen: Reopen, log_format: int
) -> None:
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=30)
    chunks = [numbered_chunk(100 * number, 20) for number in range(12)]
    for number in range(1, 5):
        pipe.write(number + 1, *chunks[3 * number - 3 : 3 * number], is_stop=number == 4)
    outside = Outside(on_write=Failing(2, 9), after_commit=Failing(2), before_commit=Failing(3))
    loop = pipe.loop(outside.build)
    loop.run()
    assert loop.status.failures == 4
    assert sorted(outside.rows) == rows_of(chunks)


# -- commits --------------------------------------------------------------------------------------------------------


def test_each_third_checkpoint_and_what_comes_again_after_an_error(reopen: Reopen, log_format: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format)
    rows = written(pipe, 8)
    seen: list[int] = []
    fails = Failing(5)

    def watch(at: Epoch, _: Chunk) -> None:
        seen.append(at.ms)
        fails()

    outside = Outside(on_write=watch)
    loop = pipe.loop(lambda settings: outside.build(settings, interval=3))
    loop.run()
    assert seen == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8], "up to 3 checkpoints come again"
    assert outside.committed == [epoch(3), epoch(6), epoch(8)]
    assert sorted(outside.rows) == rows


def test_45_a_drain_without_a_stop_ends_although_no_commit_is_due(reopen: Reopen, log_format: int) -> None:
    pipe, outside = Pipe.open(reopen(), 1, log_format), Outside()
    loop = pipe.loop(lambda settings: outside.build(settings, interval=10, idle_seconds=0.05))
    thread = threading.Thread(target=loop.run)
    thread.start()
    chunk = numbered_chunk(0, 20)
    pipe.write(2, chunk, drain_seconds=30)
    assert outside.committed == [epoch(1)]
    pipe.write(3, is_stop=True)
    thread.join(20)
    assert sorted(outside.rows) == rows_of(chunk)


def test_asynchronous_deliveries_that_fail_and_finish_in_any_order(reopen: Reopen, log_format: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=60)
    chunks = [numbered_chunk(100 * number, 20) for number in range(24)]
    for number in range(8):
        pipe.write(number + 2, *chunks[3 * number : 3 * number + 3], is_stop=number == 7)
    rng = random.Random(7)
    fails = Failing(5, 6, 21)
    delivered: set[tuple[int, int, str]] = set()

    class Parallel:
        def __init__(self) -> None:
            self.pool = ThreadPoolExecutor(4)

        def write(self, at: Epoch, chunk: Chunk) -> Future[None]:
            return self.pool.submit(self.deliver, chunk, rng.random() / 200)

        def deliver(self, chunk: Chunk, seconds: float) -> None:
            time.sleep(seconds)
            fails()
            delivered.update(rows_of(chunk))

        def barrier(self, at: Epoch, is_checkpoint: bool) -> None: ...

        def abort(self) -> None:
            self.pool.shutdown(cancel_futures=True)

    truncated: list[LogOffset] = []
    truncate = pipe.reader.truncate

    def watched(offset: LogOffset) -> None:
        done = [chunk for number, chunk in enumerate(chunks) if epoch(number // 3 + 1) <= offset.epoch]
        if offset.is_barrier:
            assert set(rows_of(done)) <= delivered, "truncated before it was delivered"
        truncated.append(offset)
        truncate(offset)

    pipe.reader.truncate = watched  # type: ignore[method-assign]
    loop = pipe.loop(lambda settings: AsyncDelivery(Parallel(), 4))
    loop.run()
    assert 1 <= loop.status.failures <= 3
    assert sorted(delivered) == rows_of(chunks)
    assert truncated[-1] == LogOffset(epoch(8))


# -- crashes and moves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 3])
def test_a_crash_at_any_place_loses_nothing_and_doubles_nothing(reopen: Reopen, log_format: int, interval: int) -> None:
    class Crash(BaseException):
        pass

    rng = random.Random(interval)
    outside, rows, at = Outside(), list[tuple[int, int, str]](), 1
    for _ in range(8):
        pipe = Pipe.open(reopen(), at, log_format, max_rows=50)
        for number in range(at, at + 3):
            chunks = [numbered_chunk(1000 * number + 100 * part, 20) for part in range(2)]
            pipe.write(number + 1, *chunks)
            rows += rows_of(chunks)
        at += 3

        def crash(*_: object) -> None:
            if rng.random() < 0.2:
                raise Crash

        outside.on_write, outside.before_commit, outside.after_commit = crash, crash, crash
        control = SinkControl()
        loop = pipe.loop(lambda settings: outside.build(settings, interval, 0.0), control=control)
        timer = threading.Timer(0.5, control.stop)
        timer.start()
        try:
            loop.run()
        except Crash:
            assert loop.status.phase is SinkPhase.FAILED
        timer.cancel()
    outside.on_write, outside.before_commit, outside.after_commit = Failing(), Failing(), Failing()
    pipe = Pipe.open(reopen(), at, log_format)
    pipe.write(at + 1, is_stop=True)
    pipe.loop(lambda settings: outside.build(settings, interval)).run()
    assert sorted(outside.rows) == sorted(rows)


@pytest.mark.parametrize("rate", [None, 700])
def test_m3_vnodes_move_between_sinks_that_fail_now_and_then(reopen: Reopen, log_format: int, rate: int | None) -> None:
    """Two instances exchange vnodes five times; each is slow, fails, and may be anywhere when it must let go."""
    store = reopen()
    first = Pipe.open(store, 1, log_format, vnodes=EVEN, max_rows=40)
    pipes = [first, Pipe.open(store, 1, log_format, vnodes=ODD, max_rows=40, factory=first.factory)]
    rng = random.Random(3)
    lock = threading.Lock()
    seen: set[tuple[int, int, str]] = set()
    threads, loops = [], []

    def watch(at: Epoch, chunk: Chunk) -> None:
        if rng.random() < 0.05:
            raise OSError("no route")

    for pipe in pipes:
        outside = Outside(on_write=watch, knows_epochs=False)  # other vnodes bring older epochs

        def after(at: Epoch, outside: Outside = outside) -> None:
            with lock:
                seen.update(outside.rows)

        outside.after_commit = after
        reader = RateLimitedReader(pipe.reader, rate)
        loop = pipe.loop(partial(outside.build, interval=2, idle_seconds=0.05), reader=reader)
        loops.append(loop)
        threads.append(threading.Thread(target=loop.run))
        threads[-1].start()
    layouts = [(ODD, EVEN), (EVEN, ODD)]
    owned = [EVEN, ODD]
    chunks = []
    for number in range(1, 21):
        made = [numbered_chunk(1000 * number + 100 * part, 30) for part in range(2)]
        chunks += made
        moves = layouts[number // 4 % 2] if number % 4 == 0 else (None, None)
        flushes = [
            pipe.end(number + 1, *(chunk.filter_vnodes(mine) for chunk in made), new_vnode_bitmap=new)
            for pipe, mine, new in zip(pipes, owned, moves, strict=True)
        ]
        for loop, flush, new in zip(loops, flushes, moves, strict=True):
            if new is not None:
                loop.control.hand_over(flush.epoch, 30)
            flush.finish()
        first.factory.sealer.seal(epoch(number))
        owned = [new or mine for new, mine in zip(moves, owned, strict=True)]
    for pipe in pipes:
        pipe.end(22, is_stop=True).finish()
    first.factory.sealer.seal(epoch(21))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert seen == set(rows_of(chunks))
    assert all(loop.status.phase is SinkPhase.ENDED for loop in loops)


def test_a_sink_that_waits_to_be_built_again_lets_go_and_stops_at_once(reopen: Reopen) -> None:
    pipe = Pipe.open(reopen(), 1, 2)
    control = SinkControl()
    failed = threading.Event()

    def build(settings: Any) -> Any:
        failed.set()
        raise OSError("no route")

    loop = SinkLoop(pipe.reader, build, control, jitter=lambda: 1.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert failed.wait(20)
    flush = pipe.end(2, numbered_chunk(0, 20), new_vnode_bitmap=EVEN)
    control.hand_over(flush.epoch, 0.9)
    flush.finish()
    control.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert loop.status.phase is SinkPhase.ENDED
    control.hand_over(epoch(9), 0.0)
