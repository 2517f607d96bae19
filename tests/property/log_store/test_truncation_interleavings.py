"""A writer that forgets and consumers that come, read, commit, go back and die, step by step in any order.

Each actor is a thread that stops before every durable step and before every look at what another actor made durable;
the test decides who goes on. Whatever the order: what a consumer was promised is there when it reads, nothing that is
gone is asked for, and in the end nothing is left that all have delivered.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

from headwater.log_store import KvLogStoreReader
from headwater.log_store import consumers as consumers_module
from headwater.log_store.errors import EpochGone, InvalidOffset
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.state import open_reader, open_writer
from headwater.state.beside import open_beside_reader
from headwater.state.query_store import open_query_store, own_state
from headwater.stream import EpochPair, VnodeBitmap

VNODES = 2
FULL = VnodeBitmap.full(VNODES)
HALVES = FULL.split(2)
LOG = "t"
SOAK = "HEADWATER_SOAK" in os.environ
SEALS = 3 if SOAK else 2
"""Of the writer, while every order is tried."""


class Died(Exception):
    """The process of an actor was killed where it stood."""


class Actor:
    """Work that goes from stop to stop, each time when it is told to."""

    def __init__(self, work: Callable[[Actor], None]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        self.dies_in = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Actor], None]) -> None:
        self._go.acquire()
        try:
            work(self)
        except BaseException as error:
            self.error = error
        self.over = True
        self._stopped.release()

    def stop(self) -> None:
        self._stopped.release()
        self._go.acquire()
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise Died

    def step(self) -> None:
        if not self.over:
            self._go.release()
            assert self._stopped.acquire(timeout=20), "an actor waits for another"
        if self.error is not None:
            raise self.error


class Stops:
    """A store whose seals and (unless nobody else writes it) snapshots are stops of an actor."""

    def __init__(self, actor: Actor, store: Any, *, looks: bool = True) -> None:
        self._actor, self._store, self._looks = actor, store, looks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def snapshot(self) -> Any:
        if self._looks:
            self._actor.stop()
        return self._store.snapshot()

    def mapped_snapshot(self) -> Any:
        self._actor.stop()
        return self._store.mapped_snapshot()

    def seal(self, *arguments: Any) -> None:
        self._actor.stop()
        self._store.seal(*arguments)


class World:
    """One log, what was sealed in it, and its actors."""

    def __init__(self) -> None:
        self.location = f"memory://{uuid.uuid4()}"
        self.sealed = 0
        self.store: Any = None
        self.factory: Any = None
        self.open(None)
        self.seal()

    def open(self, actor: Actor | None) -> None:
        """The writer's process, the first or the next one after a kill."""
        raw = open_writer(self.location, takeover=True)
        self.store = raw if actor is None else Stops(actor, raw)
        self.factory = KvLogStoreFactory(raw)
        self.factory.sealer.store = self.store
        self.log = self.factory.log(LOG, SCHEMA, KEY, 2, VNODES)
        self.writer = self.factory.writer(self.log)
        self.writer.init(EpochPair(epoch(self.sealed + 1), epoch(self.sealed)))

    def seal(self) -> None:
        """One epoch; those before it are needed by the mirrors only."""
        number = self.sealed + 1
        if self.writer.epoch == epoch(number):
            self.writer.write_chunk(numbered_chunk(10 * number, 8, VNODES))
            self.writer.end_epoch(epoch(number + 1))
            self.factory.truncation.forget_unneeded(LOG, epoch(number - 1))
        self.factory.sealer.seal(epoch(number))
        self.sealed = number

    def held(self) -> list[int]:
        with open_reader(self.location) as store, store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, LOG).epochs()]


class Mirror:
    """A consumer, and what it must get."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.consumer: LogConsumer | None = None

    def open(self, actor: Actor | None, start: int | None = None) -> None:
        source: Any = open_reader(self.world.location)
        own: Any = open_query_store(own_state(self.world.location, self.name), self.name, takeover=True)
        if actor is not None:
            source, own = Stops(actor, source), Stops(actor, own, looks=False)
        reader = KvLogStoreReader(source, own)
        reader.init([LOG], None if start is None else epoch(start))
        self.consumer = LogConsumer(reader, LOG)

    def deliver(self, vnodes: VnodeBitmap = FULL, *, commit: bool = True) -> None:
        assert self.consumer is not None
        places = dict(self.consumer.progress.places())
        after, upto = self.consumer.wait(0.0)
        got = sorted(key for batch in self.consumer.read(after, upto) for key in batch.column("id").to_pylist())
        expected = [
            key
            for number in range(after.ms + 1, upto.ms + 1)
            for key, vnode in zip(range(10 * number, 10 * number + 8), self._vnodes(number), strict=True)
            if places[vnode].epoch < epoch(number)
        ]
        assert got == expected
        if commit and upto > after:
            self.consumer.commit(upto, vnodes)

    @staticmethod
    def _vnodes(number: int) -> list[int]:
        return list(numbered_chunk(10 * number, 8, VNODES).vnodes.to_pylist())

    def rewind(self, by: int) -> None:
        assert self.consumer is not None
        before, target = self.consumer.progress, max(0, self.consumer.delivered().ms - by)
        try:
            self.consumer.rewind(epoch(target))
        except EpochGone:
            assert self.consumer.progress == before
        else:
            assert self.consumer.delivered() == epoch(target)


@pytest.fixture(autouse=True)
def looks_are_stops(monkeypatch: pytest.MonkeyPatch) -> dict[str, Actor | None]:
    """The writer stops before it reads each consumer's progress."""
    writer: dict[str, Actor | None] = {"actor": None}

    def opened(*place: str) -> Any:
        actor = writer["actor"]
        if actor is not None and threading.current_thread() is actor._thread:
            actor.stop()
        return open_beside_reader(*place)

    monkeypatch.setattr(consumers_module, "open_beside_reader", opened)
    monkeypatch.setattr(consumers_module, "_stores_kept_open", lambda location: 0)
    return writer


def settle(world: World, mirrors: list[Mirror]) -> None:
    """Everybody goes on undisturbed: nothing that all have delivered is left."""
    world.open(None)
    for mirror in mirrors:
        mirror.open(None)
        mirror.deliver()
    for _ in range(3):
        world.seal()
    assert world.held() == list(range(world.sealed - 2, world.sealed + 1))
    for mirror in mirrors:
        mirror.deliver()


# -- all orders of a few steps ------------------------------------------------------------------------------------


Move = Callable[[Mirror, Actor], None]


def comes(mirror: Mirror, actor: Actor) -> None:
    mirror.open(actor)


def goes_back(mirror: Mirror, actor: Actor) -> None:
    assert mirror.consumer is not None
    mirror.deliver()
    stops: Any = mirror.consumer.reader
    stops._book._store = Stops(actor, stops._book._store, looks=False)
    stops._source = Stops(actor, stops._source)
    mirror.rewind(2)


def run_once(schedule: list[int], looks: dict[str, Actor | None], move: Move) -> int:
    """Follow *schedule* (which actor goes on), then whoever is left; returns the steps until one was over."""
    world = World()
    mirror = Mirror(world, "late")
    if move is goes_back:
        mirror.open(None)
    for _ in range(2):
        world.seal()

    def write(actor: Actor) -> None:
        world.factory.sealer.store = Stops(actor, world.factory.sealer.store)
        for _ in range(SEALS):
            world.seal()

    actors = [Actor(write), Actor(lambda actor: move(mirror, actor))]
    looks["actor"] = actors[0]
    taken = 0
    for which in schedule:
        if any(actor.over for actor in actors):
            break
        actors[which].step()
        taken += 1
    for actor in actors:
        while not actor.over:
            actor.step()
    looks["actor"] = None
    settle(world, [mirror])
    return taken


def all_orders(looks: dict[str, Actor | None], move: Move) -> int:
    """Depth first over every order of the steps of both actors; returns how many there were."""
    schedule: list[int] = []
    runs = 0
    while True:
        taken = run_once(schedule + [0] * 64, looks, move)
        runs += 1
        schedule = (schedule + [0] * 64)[:taken]
        while schedule and schedule[-1] == 1:
            schedule.pop()
        if not schedule:
            return runs
        schedule[-1] = 1


@pytest.mark.parametrize("move", [comes, goes_back])
def test_every_order_of_a_writer_and_one_consumer(move: Move, looks_are_stops: dict[str, Actor | None]) -> None:
    assert all_orders(looks_are_stops, move) > 100


# -- longer histories ---------------------------------------------------------------------------------------------

MOVES = st.one_of(
    st.tuples(st.just("deliver"), st.sampled_from([FULL, *HALVES])),
    st.tuples(st.just("read"), st.just(FULL)),
    st.tuples(st.just("rewind"), st.integers(0, 4)),
    st.tuples(st.just("restart"), st.integers(0, 3)),
)


@settings(
    max_examples=2000 if SOAK else 100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    start=st.none() | st.integers(0, 4),
    dies_coming=st.integers(0, 4),
    writes=st.lists(st.integers(0, 4), min_size=3, max_size=8),
    moves=st.lists(st.lists(MOVES, max_size=5), min_size=2, max_size=2),
    schedule=st.lists(st.integers(0, 2), max_size=120),
)
def test_a_writer_that_dies_and_two_consumers_that_come_go_back_and_die(
    looks_are_stops: dict[str, Actor | None],
    start: int | None,
    dies_coming: int,
    writes: list[int],
    moves: list[list[tuple[str, Any]]],
    schedule: list[int],
) -> None:
    world = World()
    mirrors = [Mirror(world, "a"), Mirror(world, "b")]
    refused: set[str] = set()

    def write(actor: Actor) -> None:
        world.factory.sealer.store = Stops(actor, world.factory.sealer.store)
        for dies_in in writes:  # 0: it lives
            actor.dies_in = dies_in
            try:
                world.seal()
            except Died:
                world.open(actor)
            actor.dies_in = 0

    def consume(mirror: Mirror, steps: list[tuple[str, Any]], begin: int | None) -> Callable[[Actor], None]:
        def work(actor: Actor) -> None:
            try:
                actor.dies_in = dies_coming
                try:
                    mirror.open(actor, begin)
                except Died:
                    mirror.open(actor, begin)
                actor.dies_in = 0
            except (EpochGone, InvalidOffset):
                refused.add(mirror.name)
                return
            for kind, argument in steps:
                actor.dies_in = argument if kind == "restart" else 0
                try:
                    if kind == "rewind":
                        mirror.rewind(argument)
                    elif kind == "restart":
                        mirror.rewind(1)
                    else:
                        mirror.deliver(argument, commit=kind == "deliver")
                except Died:
                    pass
                actor.dies_in = 0
                if kind == "restart":
                    mirror.open(actor)

        return work

    actors = [Actor(write), *(Actor(consume(m, s, b)) for m, s, b in zip(mirrors, moves, (None, start), strict=True))]
    looks_are_stops["actor"] = actors[0]
    for which in schedule:
        actors[which].step()
    for actor in actors:
        while not actor.over:
            actor.step()
    looks_are_stops["actor"] = None
    settle(world, [mirror for mirror in mirrors if mirror.name not in refused])
