"""The state that each sink of a pipeline is to be in, and the requests to the process that runs the pipeline.

A request (:mod:`headwater.control.request`) is a record on the board of the pipeline store. The process that runs the
pipeline does it; where none runs, the process that asks does it itself. Answers and desired states are in a section of
that store. Where what is done is only a desired state, it is sealed with the answer. Else the answer is the last of
several seals, so the request is done at least once: a process that is killed before that seal leaves it to the next
one. The sink has the tokens of what it has, so doing it again doubles nothing; a rewind to what the sink has can then
answer that the sink has everything.

Requests of different sinks are done side by side (:mod:`headwater.pipeline.sink_request`), so what was decided of a
sink waits for the answer to its request: an answer about another sink does not seal it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Final

from headwater import failpoints
from headwater.control.command import PipelineCommand
from headwater.control.request import Answers, Request, ask, inbox_of
from headwater.errors import HeadwaterError
from headwater.state import Field, FieldType, TableSchema, WriteBatch
from headwater.state.errors import StateError
from headwater.state.query_store import QueryReader, QueryStore, open_query_store

PIPELINE: Final = "pipeline"
"""The section of the pipeline store that is of no query: names of queries have a dash."""

DESIRED_STATES = TableSchema(
    "desired_states", 1, key=(Field("sink", FieldType.TEXT),), value=(Field("state", FieldType.TEXT),)
)
AFTER_DESIRED = failpoints.register("pipeline.after_desired_state")
"""What a sink is to be is sealed, and what was asked is not done."""


class DesiredState(Enum):
    """What was asked of a sink for good."""

    RUNNING = "running"
    PAUSED = "paused"
    DROPPED = "dropped"


def ask_pipeline(state: str, command: PipelineCommand, seconds: float) -> dict[str, Any]:
    """Ask the process that runs the pipeline whose store is at *state*, and wait for its answer; what it did.

    :raises RequestFailed: what it answered. :raises NoAnswer: it did not.
    """
    return ask(state, Request(command), lambda: QueryReader(state, PIPELINE), seconds, "pipeline")


class SinkControl:
    """Desired states and answers in the pipeline store at *state*; any thread of the process that runs the pipeline.

    The store is opened when it is needed, and again after an error. Each method raises ``StateError`` when it cannot
    be used. An answer that could not be sealed then is sealed by the next call of :meth:`requests`.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._lock = threading.RLock()
        self._store: QueryStore | None = None
        self._decided: dict[str, DesiredState] = {}
        """What becomes durable with an answer."""
        self._desired_unsealed: dict[str, DesiredState] = {}
        self._unsealed: dict[str, tuple[HeadwaterError | None, dict[str, Any] | None]] = {}

    def open(self) -> None:
        """Open the store now."""
        with self._opened():
            pass

    def desired_state(self, sink: str) -> DesiredState:
        with self._lock:
            unsealed = self._desired_unsealed | self._decided
            if sink in unsealed:
                return unsealed[sink]
            with self._opened() as store, store.snapshot() as view:
                row = self._desired.get(view, 0, (sink,))
        return DesiredState.RUNNING if row is None else DesiredState(row[0])

    def put_desired_state(self, sink: str, desired: DesiredState) -> None:
        """Durable with the next answer that is about *sink*."""
        with self._lock:
            self._decided[sink] = desired

    def set_desired_state(self, sink: str, desired: DesiredState) -> None:
        """Durable on return."""
        with self._lock:
            self._decided.pop(sink, None)
            self._desired_unsealed[sink] = desired
            with self._opened() as store:
                self._seal(store)
        failpoints.hit(AFTER_DESIRED)

    def requests(self, only: type[PipelineCommand] | None = None) -> list[Request]:
        """Those that are not answered, also where they were begun. :param only: of this kind."""
        with self._opened() as store:
            self._seal(store)
            return inbox_of(self._state).open(self._answers, only=only)

    def answer(
        self,
        request: Request,
        error: HeadwaterError | None,
        result: dict[str, Any] | None = None,
        sinks: Collection[str] = (),
    ) -> None:
        """Say what became of *request*; durable on return, with what was decided of *sinks*."""
        with self._lock:
            self._desired_unsealed |= {sink: self._decided.pop(sink) for sink in sinks if sink in self._decided}
            self._unsealed[request.id] = (error, result)
            with self._opened() as store:
                self._seal(store)
            answers = self._answers
        inbox_of(self._state).finish(request, answers)

    def _seal(self, store: QueryStore) -> None:
        """Seal what was answered since the last seal."""
        if not (self._desired_unsealed or self._unsealed):
            return
        batch = WriteBatch()
        self._answers.forget_old(batch)
        for sink, desired in self._desired_unsealed.items():
            self._desired.put(batch, 0, (sink,), (desired.value,))
        for request, (error, result) in self._unsealed.items():
            self._answers.put(batch, request, error, result)
        store.seal(batch)
        self._desired_unsealed.clear()
        self._unsealed.clear()

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                store, self._store = self._store, None
                store.close()

    @contextmanager
    def _opened(self) -> Iterator[QueryStore]:
        with self._lock:
            try:
                if self._store is None:
                    self._store = open_query_store(self._state, PIPELINE, takeover=True)
                    batch = WriteBatch()
                    self._desired = self._store.catalog.open_or_create(DESIRED_STATES, batch)
                    self._answers = Answers(self._store.catalog, self._store, batch)
                    if batch:
                        self._store.seal(batch)
                yield self._store
            except StateError:
                with suppress(StateError):
                    self.close()
                raise
