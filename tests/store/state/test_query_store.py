"""The store that queries share: sections, generations, deferred writes, seals of several queries at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater import failpoints
from headwater.log_store.consumers import Consumers
from headwater.state import Field, FieldType, TableSchema, WriteBatch
from headwater.state.beside import open_beside_writer
from headwater.state.catalog import Catalog
from headwater.state.errors import StoreCorrupt, StoreNotFound, StoreOwned, StoreUnavailable, WriterFenced
from headwater.state.query_store import (
    QueryReader,
    QueryStore,
    open_query_store,
    own_state,
    pipeline_state,
)
from headwater.stream.epoch import Epoch

NUMBERS = TableSchema("numbers", 1, key=(Field("name", FieldType.TEXT),), value=(Field("number", FieldType.INT),))


@pytest.fixture(params=["memory", "embedded", "slatedb"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    where = {
        "memory": f"memory://{uuid.uuid4()}",
        "embedded": str(tmp_path / "store"),
        "slatedb": f"slatedb+file://{tmp_path}/objects",
    }
    return pipeline_state(where[request.param], "shop")


def numbered(store: QueryStore, **numbers: int) -> WriteBatch:
    batch = WriteBatch()
    table = store.catalog.open_or_create(NUMBERS, batch)
    for name, number in numbers.items():
        table.put(batch, 0, (name,), (number,))
    return batch


def read(state: str, query: str) -> dict[str, int]:
    with QueryReader(state, query) as reader, reader.snapshot() as view:
        catalog = Catalog.load(view)
        if NUMBERS.name not in catalog.names():
            return {}
        return {key[0]: values[0] for key, values in catalog.open(NUMBERS).scan(view, 0)}


def in_another_process(text: str, state: str) -> int:
    head = (
        "import os, signal, sys\n"
        "from tests.store.state.test_query_store import numbered\n"
        "from headwater.state.query_store import open_query_store\n"
        "state = sys.argv[1]\n"
    )
    return subprocess.run([sys.executable, "-c", head + text, state], check=False).returncode


def test_queries_of_one_store_know_nothing_of_each_other(state: str) -> None:
    with open_query_store(state, "a") as one, open_query_store(state, "b") as other:
        one.seal(numbered(one, x=1))
        other.seal(numbered(other, x=2, y=3))
        assert (read(state, "a"), read(state, "b")) == ({"x": 1}, {"x": 2, "y": 3})
        other.clear()
        assert (read(state, "a"), read(state, "b")) == ({"x": 1}, {})
        other.seal(numbered(other, z=4))
    assert (read(state, "a"), read(state, "b")) == ({"x": 1}, {"z": 4})
    with pytest.raises(StoreNotFound):
        read(state, "c")


def test_a_writer_that_was_taken_over_writes_nothing(state: str) -> None:
    with open_query_store(state, "a") as old, open_query_store(state, "b") as other:
        with pytest.raises(StoreOwned):
            open_query_store(state, "a")
        with open_query_store(state, "a", takeover=True) as new:
            assert new.generation == old.generation + 1
            with pytest.raises(WriterFenced):
                old.seal(numbered(old, x=1))
            new.seal(numbered(new, x=2))
            other.seal(numbered(other, x=3))
        old.defer(numbered(old, x=9))
    assert (read(state, "a"), read(state, "b")) == ({"x": 2}, {"x": 3})
    with open_query_store(state, "a") as later:
        later.clear()
        assert later.generation == 3
    with open_query_store(state, "a") as later:
        assert later.generation == 4


def test_a_process_that_takes_the_store_over_fences_all_of_its_queries(tmp_path: Path) -> None:
    state = pipeline_state(str(tmp_path), "shop")
    with open_query_store(state, "a") as old, open_query_store(state, "b") as other:
        ended = in_another_process(
            "store = open_query_store(state, 'a', takeover=True)\n"
            "store.seal(numbered(store, x=2))\n"
            "assert store.generation == 2\n",
            state,
        )
        assert ended == 0
        for store in (old, other):
            with pytest.raises(WriterFenced):
                store.seal(numbered(store, x=1))
        with open_query_store(state, "a", takeover=True) as new:
            assert new.generation == 3
            new.seal(numbered(new, y=3))
    assert (read(state, "a"), read(state, "b")) == ({"x": 2, "y": 3}, {})


def test_what_is_deferred_is_sealed_with_the_next_seal_of_its_query(state: str) -> None:
    with open_query_store(state, "a") as one, open_query_store(state, "b") as other:
        one.defer(numbered(one, x=1))
        other.seal(numbered(other, y=1))
        assert read(state, "a") == {}
        one.seal(numbered(one, x=2, z=3))
        assert read(state, "a") == {"x": 2, "z": 3}
        one.defer(numbered(one, x=4))
        one.flush()
        assert read(state, "a") == {"x": 4, "z": 3}
        one.defer(numbered(one, x=5))
    assert read(state, "a") == {"x": 5, "z": 3}


def test_a_kill_loses_what_was_deferred_and_nothing_else(tmp_path: Path) -> None:
    state = own_state(str(tmp_path), "a")
    ended = in_another_process(
        "store = open_query_store(state, 'a')\n"
        "store.defer(numbered(store, x=1))\n"
        "store.seal(numbered(store, y=2))\n"
        "store.defer(numbered(store, y=3))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        state,
    )
    assert ended == -9
    assert read(state, "a") == {"x": 1, "y": 2}


def test_a_seal_that_fails_keeps_what_was_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = own_state(str(tmp_path), "a")
    with open_query_store(state, "a") as store:
        store.defer(numbered(store, x=1))
        failpoints.arm("state.embedded.seal_before_commit=raise")
        with pytest.raises(failpoints.FailpointError):
            store.seal(numbered(store, y=2))
        failpoints.arm("")
        assert read(state, "a") == {}
        store.seal(numbered(store, y=3))
        assert read(state, "a") == {"x": 1, "y": 3}


def test_half_of_a_seal_that_failed_is_not_made_durable_by_a_close(tmp_path: Path) -> None:
    state = own_state(str(tmp_path), "a")
    with open_query_store(state, "a") as store:
        store.defer(numbered(store, x=1))
        failpoints.arm("state.embedded.seal_before_commit=raise")
        with pytest.raises(failpoints.FailpointError):
            store.seal(numbered(store, y=2))
        failpoints.arm("")
    assert read(state, "a") == {}


def test_what_is_deferred_is_not_made_durable_by_the_end_of_a_block_that_an_error_ends(tmp_path: Path) -> None:
    state = own_state(str(tmp_path), "a")

    def interrupted() -> None:
        with open_query_store(state, "a") as store:
            store.defer(numbered(store, x=1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read(state, "a") == {}


def test_a_store_whose_handle_broke_is_opened_again_while_other_queries_have_it(tmp_path: Path) -> None:
    state = pipeline_state(f"slatedb+file://{tmp_path}/objects", "shop")
    one, other = open_query_store(state, "a"), open_query_store(state, "b")
    other.seal(numbered(other, y=1))
    failpoints.arm("state.object_store.seal_before_flush=raise")
    with pytest.raises(failpoints.FailpointError):
        one.seal(numbered(one, x=1))
    failpoints.arm("")
    one.close()
    with open_query_store(state, "a") as again:
        again.seal(numbered(again, x=2))
        with pytest.raises(StoreUnavailable):
            other.seal(numbered(other, y=2))
        other.close()
        with open_query_store(state, "b") as other_again:
            other_again.seal(numbered(other_again, y=3))
        again.seal(numbered(again, z=4))
    assert (read(state, "a"), read(state, "b")) == ({"x": 2, "z": 4}, {"y": 3})


def test_a_store_has_one_writer_in_a_process_however_its_location_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_query_store(str(tmp_path / "store"), "a") as one, open_query_store("store", "b") as other:
        one.seal(numbered(one, x=1))
        other.seal(numbered(other, y=1))


def test_seals_of_many_queries_at_the_same_time_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pipeline_state(str(tmp_path), "shop")
    stores = [open_query_store(state, f"q{number}") for number in range(8)]
    begun, go_on = threading.Event(), threading.Event()
    seals: list[str] = []

    def hit(name: str) -> None:
        if name == "state.embedded.seal_begun":
            seals.append(name)
            begun.set()
            assert go_on.wait(20)

    monkeypatch.setattr(failpoints, "hit", hit)
    threads = [threading.Thread(target=_sealing(store)) for store in stores]
    threads[0].start()
    assert begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    threads[-1].join(0.5)  # they wait for the seal that is under way
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [read(state, store.query) for store in stores] == [{"x": 1}] * 8
    assert len(seals) < len(stores)
    for store in stores:
        store.close()


def _sealing(store: QueryStore) -> Callable[[], None]:
    return lambda: store.seal(numbered(store, x=1))


def test_state_of_an_earlier_release_is_refused(tmp_path: Path) -> None:
    location = str(tmp_path)
    with open_beside_writer(location, "queries", "q") as store:
        batch = WriteBatch()
        with store.snapshot() as view:
            Catalog.load(view).open_or_create(NUMBERS, batch)
        store.seal(Epoch.from_ms(1), batch)
    with pytest.raises(StoreCorrupt, match="earlier release"):
        open_query_store(own_state(location, "q"), "q", takeover=True)
    consumers = Consumers(location)
    with pytest.raises(StoreCorrupt, match="earlier release"):
        consumers.all()
    consumers.close()
