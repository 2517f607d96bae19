"""What is asked of the sinks of a pipeline, and the state that each of them is to be in.

=============  =================================================================================================
``pause``      its query ends after its batch; its log waits
``resume``     it goes on; one that was dropped begins anew
``retry``      one that failed, or waits after a failure, is started now
``rewind``     it is delivered again what came after an epoch; what the sink has it leaves out
``drop``       its logs wait for it no longer, and nothing is known of it any more; what the sink has stays
``add``        it is new in the pipeline's file, and is delivered to from now on
=============  =================================================================================================

A request is a record on the board of the pipeline store (:mod:`headwater.state.requests`). The process that runs the
pipeline does it while its asker waits; where none runs, the process that asks does it itself. Answers and desired
states are in a section of that store. The answer is the last of several seals, so a request is done at least once: a
process that is killed before that seal leaves it to the next one. The sink has the tokens of what it has, so doing it
again doubles nothing; a ``rewind`` to what the sink has can then answer that the sink has everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from headwater import failpoints
from headwater.errors import HeadwaterError
from headwater.state import Field, FieldType, TableSchema, WriteBatch
from headwater.state.errors import StateError
from headwater.state.query_store import QueryReader, QueryStore, open_query_store
from headwater.state.requests import Answers, Request, ask, inbox_of

PIPELINE: Final = "pipeline"
"""The section of the pipeline store that is of no query: names of queries have a dash."""

DESIRED_STATES = TableSchema(
    "desired_states", 1, key=(Field("sink", FieldType.TEXT),), value=(Field("state", FieldType.TEXT),)
)
AFTER_DESIRED = failpoints.register("pipeline.after_desired_state")
"""What a sink is to be is sealed, and what was asked is not done."""


class SinkRequestKind(Enum):
    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    REWIND = "rewind"
    DROP = "drop"
    ADD = "add"


class DesiredState(Enum):
    """What was asked of a sink for good."""

    RUNNING = "running"
    PAUSED = "paused"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """What is asked of a sink. :ivar epoch: to which it is rewound; ``None``: to what the sink has."""

    sink: str
    kind: SinkRequestKind
    epoch: int | None = None


def ask_pipeline(state: str, request: SinkRequest, seconds: float) -> dict[str, Any]:
    """Ask the process that runs the pipeline whose store is at *state*, and wait for its answer.

    :raises RequestFailed: what it answered. :raises NoAnswer: it did not.
    """
    detail = {"sink": request.sink, "epoch": request.epoch}
    asked = Request(request.kind.value, detail, seconds=seconds)
    return ask(state, asked, lambda: QueryReader(state, PIPELINE), seconds, "pipeline")


class SinkControl:
    """Desired states and answers in the pipeline store at *state*; one thread of the process that runs the pipeline.

    The store is opened when it is needed, and again after an error. Each method raises ``StateError`` when it cannot
    be used. An answer that could not be sealed then is sealed by the next call of :meth:`requests`.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._store: QueryStore | None = None
        self._unsealed: dict[str, tuple[HeadwaterError | None, dict[str, Any] | None]] = {}

    def open(self) -> None:
        """Open the store now."""
        with self._opened():
            pass

    def desired_state(self, sink: str) -> DesiredState:
        with self._opened() as store, store.snapshot() as view:
            found = self._desired.get(view, 0, (sink,))
        return DesiredState.RUNNING if found is None else DesiredState(found[0])

    def set_desired_state(self, sink: str, desired: DesiredState) -> None:
        """Durable on return."""
        with self._opened() as store:
            batch = WriteBatch()
            self._desired.put(batch, 0, (sink,), (desired.value,))
            store.seal(batch)
        failpoints.hit(AFTER_DESIRED)

    def requests(self) -> list[Request]:
        """Those that are not done, and whose askers wait."""
        with self._opened() as store:
            self._seal_answers(store)
            return inbox_of(self._state).open(self._answers)

    def answer(self, request: Request, error: HeadwaterError | None, result: dict[str, Any] | None = None) -> None:
        """Say what became of *request*; durable on return."""
        self._unsealed[request.id] = (error, result)
        with self._opened() as store:
            self._seal_answers(store)
        inbox_of(self._state).remove(request)

    def _seal_answers(self, store: QueryStore) -> None:
        if self._unsealed:
            batch = WriteBatch()
            self._answers.forget_old(batch)
            for request, (error, result) in self._unsealed.items():
                self._answers.put(batch, request, error, result)
            store.seal(batch)
            self._unsealed.clear()

    def close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            store.close()

    @contextmanager
    def _opened(self) -> Iterator[QueryStore]:
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


def sink_request(request: Request) -> SinkRequest:
    """What *request* asks. :raises ValueError: it is unknown here. :raises KeyError: it lacks something."""
    return SinkRequest(request.detail["sink"], SinkRequestKind(request.kind), request.detail["epoch"])
