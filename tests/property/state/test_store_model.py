"""Random histories of every engine against a plain model: one dict per sealed epoch.

Batches of puts, deletes and range deletes, pins, reopens and takeovers; after every step each readable epoch holds
exactly what the model says, forwards and backwards, and nothing else is readable.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
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

from headwater.state import StateStore, WriteBatch, open_reader, open_writer
from headwater.state.errors import EpochNotHeld, EpochNotIncreasing, WriterFenced
from headwater.stream.epoch import Epoch

KEYS = st.sampled_from([b"a", b"a\x00", b"aa", b"b", b"b\xff", b"c", b"\x00", b"\xff", b"\xff\xff"]) | st.binary(
    min_size=1, max_size=3
)
VALUES = st.binary(max_size=6) | st.sampled_from([b"L" * 5000, b"M" * 9000])
STEPS = st.lists(
    st.tuples(st.just("put"), KEYS, VALUES)
    | st.tuples(st.just("delete"), KEYS)
    | st.tuples(st.just("delete_range"), st.none() | KEYS, st.none() | KEYS),
    max_size=8,
)


class StoreMachine(RuleBasedStateMachine):
    engine = ""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-model-"))
        self.location = {
            "memory": f"memory://{uuid.uuid4()}",
            "embedded": str(self.folder / "store"),
            "slatedb": f"slatedb+file://{self.folder}/store",
        }[self.engine]
        self.store = open_writer(self.location)
        self.clock = 0
        self.now: dict[bytes, bytes] = {}
        self.epoch = Epoch(0)
        self.history: dict[int, dict[bytes, bytes]] = {0: {}}
        self.pins: dict[str, int] = {}
        self.fenced: list[StateStore] = []

    @rule(steps=STEPS, skip=st.integers(1, 3))
    def seal(self, steps: list[tuple[Any, ...]], skip: int) -> None:
        batch = WriteBatch()
        model = dict(self.now)
        for verb, *arguments in steps:
            getattr(batch, verb)(*arguments)
            if verb == "put":
                model[arguments[0]] = arguments[1]
            elif verb == "delete":
                model.pop(arguments[0], None)
            else:
                low, high = arguments
                for key in [key for key in model if (low or b"") <= key and (high is None or key < high)]:
                    del model[key]
        self.clock += skip
        self.epoch = Epoch.from_ms(self.clock)
        self.store.seal(self.epoch, batch)
        self.now = model
        self.history[self.epoch] = model

    @precondition(lambda self: self.clock > 0)
    @rule(back=st.integers(0, 2))
    def seal_into_the_past(self, back: int) -> None:
        batch = WriteBatch()
        batch.put(b"a", b"never")
        with pytest.raises(EpochNotIncreasing):
            self.store.seal(Epoch.from_ms(max(1, self.clock - back)), batch)

    @rule(name=st.sampled_from("xyz"))
    def pin(self, name: str) -> None:
        assert self.store.pin(name).epoch == self.pins.setdefault(name, self.epoch)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.unpin(name)
        del self.pins[name]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_writer(self.location)

    @rule()
    def take_over(self) -> None:
        self.fenced.append(self.store)
        self.store = open_writer(self.location, takeover=True)

    @precondition(lambda self: self.fenced)
    @rule()
    def write_as_a_fenced_writer(self) -> None:
        batch = WriteBatch()
        batch.put(b"a", b"stale")
        with pytest.raises(WriterFenced):
            self.fenced[-1].seal(Epoch.from_ms(self.clock + 1), batch)

    @invariant()
    def every_readable_epoch_is_what_the_model_says(self) -> None:
        assert self.store.committed_epoch() == self.epoch
        readable = {*self.pins.values(), self.epoch}
        for epoch in readable:
            model = self.history[epoch]
            with self.store.snapshot(epoch) as view:
                assert view.epoch == epoch
                found = list(view.scan())
                assert found == sorted(model.items())
                assert list(view.scan(reverse=True)) == found[::-1]
                assert list(view.scan(b"a", b"b\xff")) == [cell for cell in found if b"a" <= cell[0] < b"b\xff"]
                for key in (b"a", b"b", b"\xff"):
                    assert view.get(key) == model.get(key)
        for epoch in list(self.history)[-4:]:
            if epoch not in readable:
                with pytest.raises(EpochNotHeld):
                    self.store.snapshot(epoch)

    @invariant()
    def another_handle_sees_the_same(self) -> None:
        with open_reader(self.location) as reader, reader.snapshot() as view:
            assert (view.epoch, dict(view.scan())) == (self.epoch, self.now)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            for store in self.fenced:
                store.close()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(("engine", "examples"), [("memory", 60), ("embedded", 60), ("slatedb", 12)])
def test_every_engine_behaves_as_the_model(engine: str, examples: int) -> None:
    machine = type("Machine", (StoreMachine,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
