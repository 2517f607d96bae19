"""One consumer of many logs: one store, one seal, and each log forgets what it delivered."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.query_state import group_rows, grouped

from headwater.log_store.errors import EpochGone, LogNotFound
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.group import ConsumerGroup
from headwater.log_store.log_view import LogView
from headwater.log_store.remote import LogConsumer
from headwater.log_store.remote_consumers import RemoteConsumers
from headwater.log_store.status import log_status
from headwater.log_store.testing import KEY, SCHEMA, epoch, random_chunk
from headwater.state import stores_beside
from headwater.state.errors import StoreOwned, WriterFenced
from headwater.state.location import open_writer
from headwater.state.query_store import own_state
from headwater.stream import Epoch, EpochPair

LOGS = ("public.orders", "public.lines", "public.notes")


class Source:
    """Three logs of one store."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.store = open_writer(location)
        self.factory = KvLogStoreFactory(self.store)
        self._rng = random.Random(3)
        self.writers = [self.factory.writer(self.factory.log(name, SCHEMA, KEY)) for name in LOGS]
        for writer in self.writers:
            writer.init(EpochPair(epoch(1), Epoch(0)))

    def write(self, count: int) -> None:
        for _ in range(count):
            number = self.writers[0].epoch
            for writer in self.writers:
                writer.write_chunk(random_chunk(self._rng, 10))
                writer.flush_current_epoch(epoch(number.ms + 1)).finish()
            self.factory.sealer.seal(number)

    def held(self, log: str) -> list[int]:
        with self.store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, log).epochs()]

    def close(self) -> None:
        self.factory.close()
        self.store.close()


@pytest.fixture(params=["memory", "embedded", "slatedb"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made = Source(
        {
            "memory": f"memory://{uuid.uuid4()}",
            "embedded": str(tmp_path / "store"),
            "slatedb": f"slatedb+file://{tmp_path}/store",
        }[request.param]
    )
    made.write(1)  # a log is there once it is sealed
    yield made
    made.close()


def see(group: ConsumerGroup, number: int) -> None:
    """An object store shows a seal to readers a little later."""
    end = time.monotonic() + 10
    while group._source.committed_epoch() < epoch(number) and time.monotonic() < end:
        time.sleep(0.02)


def test_progress_in_all_logs_is_one_seal_and_each_log_forgets(source: Source) -> None:
    with grouped(source.location, "mirror") as group:
        consumers = {log: group.consumer(log) for log in LOGS}
        source.write(3)
        see(group, 4)
        group.commit({"public.orders": epoch(3), "public.lines": epoch(2)})
        assert {log: one.delivered().ms for log, one in consumers.items()} == {
            "public.orders": 3,
            "public.lines": 2,
            "public.notes": 0,
        }
    assert sorted(group_rows(own_state(source.location, "mirror"), "mirror")) == sorted(LOGS)
    source.write(3)
    assert [source.held(log)[0] for log in LOGS] == [4, 3, 1]
    with grouped(source.location, "mirror") as group:
        assert group.consumer("public.orders").delivered() == epoch(3)
        found = {one.log: one.delivered().ms for one in RemoteConsumers(source.location).all()}
        assert found == {"public.orders": 3, "public.lines": 2, "public.notes": 0}


def test_a_consumer_that_had_a_store_of_its_own_joins_the_group_where_it_was(source: Source) -> None:
    source.write(2)
    with LogConsumer.open(source.location, "public.orders", "mirror") as alone:
        source.write(3)
        end = time.monotonic() + 10
        while alone._source.committed_epoch() < epoch(5) and time.monotonic() < end:
            time.sleep(0.02)
        alone.commit(epoch(4))
        started = alone.started
    with grouped(source.location, "mirror") as group:
        joined = group.consumer("public.orders")
        assert (joined.delivered(), joined.started) == (epoch(4), started)
    found = RemoteConsumers(source.location)
    assert [(one.log, one.name, one.delivered().ms) for one in found.all()] == [("public.orders", "mirror", 4)]
    found.close()
    with LogConsumer.open(source.location, "public.orders", "mirror") as member:  # one of a group is opened there
        assert member.delivered() == epoch(4)
    if "://" not in source.location:
        assert stores_beside(source.location, "consumers", 2) == []


def test_a_log_that_is_dropped_waits_no_longer(source: Source) -> None:
    with grouped(source.location, "mirror") as group:
        group.consumer("public.orders")
        source.write(2)
        group.drop("public.orders")
        source.factory.truncation.forget_unneeded("public.orders", epoch(2))
        source.write(3)
        assert source.held("public.orders")[0] > 2
        with pytest.raises(LogNotFound):
            group.consumer("public.nothing")


def test_only_one_process_is_the_group(source: Source) -> None:
    with grouped(source.location, "mirror") as first:
        first.consumer("public.orders")
        source.write(1)
        see(first, 1)
        with pytest.raises(StoreOwned), grouped(source.location, "mirror"):
            pass
        with grouped(source.location, "mirror", takeover=True) as second:
            second.consumer("public.orders")
            with pytest.raises(WriterFenced):
                first.commit({"public.orders": epoch(1)})


def test_one_of_the_group_goes_back_alone_as_far_as_the_log_holds(source: Source) -> None:
    with grouped(source.location, "mirror") as group:
        one = group.consumer("public.orders")
        other = group.consumer("public.lines")
        source.write(3)
        see(group, 3)
        group.commit({"public.orders": epoch(3), "public.lines": epoch(3)})
        one.rewind(epoch(1))
        assert (one.delivered(), other.delivered()) == (epoch(1), epoch(3))
        source.write(2)
        assert source.held("public.orders")[0] == 2
        see(group, 5)
        group.commit({"public.orders": epoch(5)})
        source.write(3)
        see(group, 8)
        with pytest.raises(EpochGone):
            one.rewind(epoch(1))
    status = {one.name: [each.name for each in one.consumers] for one in log_status(source.store)}
    assert status == {"public.lines": ["mirror"], "public.notes": [], "public.orders": ["mirror"]}
