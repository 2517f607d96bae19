"""Requests to sinks, of which one waits for its batch: the others go on, and each does what it was asked in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.store.pipeline.test_sink_control import answers

from headwater.control.command import PauseSinks, ResumeSinks, RetrySink, SinkCommand
from headwater.control.request import Request, leave
from headwater.errors import TransientError
from headwater.pipeline.config import configure
from headwater.pipeline.sink_control import DESIRED_STATES, PIPELINE, DesiredState, SinkControl
from headwater.pipeline.sink_request import SinkRequest
from headwater.pipeline.supervised_query import SinkState, SupervisedQuery
from headwater.state import Catalog
from headwater.state.query_store import QueryReader

pytestmark = pytest.mark.store


class Sink(SupervisedQuery):
    """Its batch ends when *batch* is set. What it was asked is in *done*."""

    kind = "sink"

    def __init__(self, label: str, control: SinkControl, folder: Path) -> None:
        settings: dict[str, Any] = {"source": {"dsn": "postgresql://x", "tables": ["t"]}}
        host: Any = None
        super().__init__(configure(settings, folder=folder), label, host, lambda kind, fields: None, control)
        self.batch, self.waits, self.fails = threading.Event(), threading.Event(), False
        self.done: list[str] = []
        self.batch.set()

    def _start(self) -> None: ...
    def _look(self) -> None: ...
    def _lose(self) -> None: ...
    def ask_to_stop(self) -> None: ...

    def stop(self) -> None:
        with self.lock:
            self._stopped()

    def _rest(self, state: SinkState) -> None:
        self.waits.set()
        assert self.batch.wait(60)
        if self.fails:
            raise TransientError("It does not end.")
        self._control.put_desired_state(self.label, DesiredState.PAUSED)
        self.state = state

    def _forget(self) -> list[str]:
        return []

    def _let_back(self) -> list[str]:
        return []

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        return {}

    def serve(self, command: SinkCommand) -> dict[str, Any]:
        effect = super().serve(command)
        self.done.append(type(command).__name__)
        return effect


class Served:
    """The sinks *a* and *b*, and the requests to them."""

    def __init__(self, folder: Path, control: SinkControl) -> None:
        self.state, self.control, self.stop = str(folder / "state"), control, threading.Event()
        self.a, self.b = Sink("a", control, folder), Sink("b", control, folder)
        self._begun: list[SinkRequest] = []

    def ask(self, command: SinkCommand) -> SinkRequest:
        """Begin with it."""
        sinks = [sink for sink in (self.a, self.b) if command.sink in (None, sink.label)]
        request = Request(command)
        leave(self.state, request)
        while request.id not in [one.id for one in self.control.requests()]:
            pass
        begun = SinkRequest(request, command, sinks, self._begun, self.control, self.stop)
        self._begun.append(begun)
        return begun

    def sealed(self, sink: str) -> DesiredState:
        """As the next process would find it."""
        with QueryReader(self.state, PIPELINE) as reader, reader.snapshot() as view:
            row = Catalog.load(view).open(DESIRED_STATES).get(view, 0, (sink,))
        return DesiredState.RUNNING if row is None else DesiredState(row[0])


def over(*requests: SinkRequest) -> None:
    for request in requests:
        request.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with closing(SinkControl(str(tmp_path / "state"))) as control:
        made = Served(tmp_path, control)
        yield made
        made.a.batch.set()
        over(*made._begun)


def test_another_sink_is_looked_after_and_paused_while_one_waits_for_its_batch(served: Served) -> None:
    served.a.batch.clear()
    slow = served.ask(PauseSinks("a"))
    assert served.a.waits.wait(60)
    served.a.step()
    served.b.step()
    assert (served.a.state, served.b.state) == (SinkState.STARTING, SinkState.RUNNING)
    quick = served.ask(PauseSinks("b"))
    over(quick)
    assert answers(served.state) == {quick.id: ""}
    assert not slow.is_over
    served.a.batch.set()
    over(slow)
    assert answers(served.state) == {quick.id: "", slow.id: ""}
    assert served.a.state is SinkState.PAUSED


def test_one_sink_does_its_requests_in_order_and_each_once(served: Served) -> None:
    served.a.batch.clear()
    asked = [served.ask(command) for command in (PauseSinks("a"), ResumeSinks("a"), RetrySink("a"), PauseSinks("a"))]
    served.a.batch.set()
    over(*asked)
    assert served.a.done == ["PauseSinks", "ResumeSinks", "RetrySink", "PauseSinks"]
    assert len(answers(served.state)) == 4
    assert served.sealed("a") is DesiredState.PAUSED


def test_all_sinks_are_paused_side_by_side_and_the_last_one_answers(served: Served) -> None:
    served.a.batch.clear()
    every = served.ask(PauseSinks())
    later = served.ask(ResumeSinks("b"))
    assert served.a.waits.wait(60)
    assert served.b.waits.wait(60)
    with served.b.lock:
        pass  # its part is over
    assert served.b.done == ["PauseSinks"], "what it is asked next begins after the answer"
    assert served.sealed("b") is DesiredState.RUNNING, "it is sealed with the answer"
    served.a.batch.set()
    over(every, later)
    assert answers(served.state) == {every.id: "", later.id: ""}
    assert (served.sealed("a"), served.sealed("b")) == (DesiredState.PAUSED, DesiredState.RUNNING)


def test_what_is_decided_of_one_sink_is_not_sealed_with_an_answer_about_another(served: Served) -> None:
    served.control.put_desired_state("a", DesiredState.PAUSED)
    over(served.ask(PauseSinks("b")))
    served.control.requests()
    assert (served.sealed("a"), served.sealed("b")) == (DesiredState.RUNNING, DesiredState.PAUSED)


def test_a_part_that_fails_is_answered_for_all_and_the_others_stay_as_they_are(served: Served) -> None:
    served.a.fails = True
    every = served.ask(PauseSinks())
    over(every)
    assert answers(served.state) == {every.id: "It does not end."}
    assert (served.sealed("a"), served.sealed("b")) == (DesiredState.RUNNING, DesiredState.PAUSED)


def test_a_stop_ends_what_was_begun_and_leaves_the_rest_to_the_next_process(served: Served) -> None:
    served.a.batch.clear()
    begun, left = served.ask(PauseSinks("a")), served.ask(ResumeSinks("a"))
    assert served.a.waits.wait(60)
    served.stop.set()
    ending = threading.Thread(target=served.a.stop)
    ending.start()
    served.a.batch.set()
    ending.join(60)
    over(begun, left)
    assert served.a.done == ["PauseSinks"]
    assert answers(served.state) == {begun.id: ""}
    with closing(SinkControl(served.state)) as control:
        while left.id not in [request.id for request in control.requests()]:
            pass
