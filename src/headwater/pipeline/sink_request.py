"""SinkRequest: a request that one sink of a running pipeline does, or all of them side by side.

Each sink has its part in a thread for it, after the requests that it was asked before: a batch that is waited for holds
up no other sink. The last part answers. What a sink is asked next begins after that, so that a driver that is killed
leaves the requests of one sink in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from headwater.control.command import SinkCommand
from headwater.control.request import Request
from headwater.errors import HeadwaterError
from headwater.pipeline.errors import PipelineError
from headwater.pipeline.sink_control import SinkControl
from headwater.pipeline.supervised_query import SupervisedQuery


class SinkRequest:
    """A request for *sinks*, which is begun at once.

    :param earlier: requests that were begun before: a sink does its part of them first.
    :param stop: once it is set, no part begins any more; a request that has such a part is not answered.
    :ivar id: of the request.
    """

    def __init__(
        self,
        request: Request,
        command: SinkCommand,
        sinks: Sequence[SupervisedQuery],
        earlier: Iterable[SinkRequest],
        control: SinkControl,
        stop: threading.Event,
    ) -> None:
        self.id, self._request, self._command, self._control, self._stop = request.id, request, command, control, stop
        self._lock = threading.Lock()
        self._left = len(sinks)
        self._effect: dict[str, Any] = {}
        self._states: dict[str, str] = {}
        self._problem: HeadwaterError | None = None
        before = list(earlier)
        self._parts: dict[str, threading.Thread] = {
            sink.label: threading.Thread(
                target=self._serve,
                args=(sink, [one for one in before if sink.label in one._parts]),
                name=f"headwater-request-{sink.label}",
                daemon=True,
            )
            for sink in sinks
        }
        for part in self._parts.values():
            part.start()

    @property
    def is_over(self) -> bool:
        """Whether it is answered, or never will be by this process."""
        return not any(part.is_alive() for part in self._parts.values())

    def wait(self) -> None:
        """Until it is over."""
        for part in self._parts.values():
            part.join()

    def _serve(self, sink: SupervisedQuery, earlier: Sequence[SinkRequest]) -> None:
        for one in earlier:
            one.wait()
        effect: dict[str, Any] = {}
        problem: HeadwaterError | None = None
        with sink.lock:
            if self._stop.is_set():
                return
            try:
                effect = sink.serve(self._command)
            except Exception as error:  # the pipeline goes on, whatever one sink cannot do
                problem = problem_of(error)
            state = sink.state.value
        with self._lock:
            self._effect |= effect
            self._states[sink.label] = state
            self._problem = self._problem or problem
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._answer()

    def _answer(self) -> None:
        effect = {} if self._problem else self._effect | {"sinks": self._states}
        with suppress(HeadwaterError, OSError):  # it is sealed, or removed, with the next look at the requests
            self._control.answer(self._request, self._problem, effect, self._parts)


def problem_of(error: Exception) -> HeadwaterError:
    """*error* as an answer."""
    if isinstance(error, HeadwaterError):
        return error
    return PipelineError(f"It could not be done: {type(error).__name__}.", next_step="Look: headwater status")
