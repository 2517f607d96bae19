"""Requests to the sinks of a pipeline, from any process, and what was wished of each sink for good.

=============  =================================================================================================
``pause``      its query ends after its batch; its log waits
``resume``     it goes on; one that was dropped begins anew
``retry``      one that failed, or waits after a failure, is started now
``rewind``     it is delivered again what came after an epoch; what the sink has it leaves out
``drop``       its logs wait for it no longer, and nothing is known of it any more; what the sink has stays
``add``        it is new in the pipeline's file, and is delivered to from now on
=============  =================================================================================================

A request is a file in the work folder of the pipeline (``requests/<id>.json``). The process that runs the pipeline does
it and writes the answer beside it; where none runs, the process that asks does it itself. ``sinks/<label>.json`` keeps
that a sink is paused or dropped, over restarts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from headwater.errors import HeadwaterError
from headwater.pipeline.errors import NoAnswer, SinkRequestFailed
from headwater.private_files import make_private, replace_private

_REQUESTS: Final = "requests"
_SINKS: Final = "sinks"
_LOOK_SECONDS: Final = 0.1
_FORGET_SECONDS: Final = 3600.0


class SinkRequestKind(Enum):
    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    REWIND = "rewind"
    DROP = "drop"
    ADD = "add"


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """What somebody asks of a sink.

    :ivar epoch: to which it is rewound; ``None``: to what the sink has.
    :ivar until: the time after which nobody waits for it any more, and it is not done; ``None``: not asked yet.
    """

    sink: str
    kind: SinkRequestKind
    epoch: int | None = None
    until: float | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class SinkWish:
    """What was asked of a sink for good."""

    paused: bool = False
    dropped: bool = False


class SinkRequests:
    """The requests to the sinks of the pipeline whose work folder is *work*."""

    def __init__(self, work: Path) -> None:
        self._requests, self._sinks = work / _REQUESTS, work / _SINKS

    def ask(self, request: SinkRequest, seconds: float) -> dict[str, Any]:
        """Ask the process that runs the pipeline, and wait for its answer.

        :raises SinkRequestFailed: what it answered. :raises NoAnswer: it did not.
        """
        make_private(self._requests)
        value = asdict(request) | {"kind": request.kind.value, "until": time.time() + seconds}
        replace_private(self._path(request.id), json.dumps(value), durable=True)
        answer = self._answer(request.id)
        end = time.monotonic() + seconds
        try:
            while not answer.exists():
                if time.monotonic() > end:
                    raise NoAnswer(
                        f"The pipeline did not answer within {seconds:g} s.",
                        next_step="Look whether it runs: headwater status",
                    )
                time.sleep(_LOOK_SECONDS)
        finally:
            self._path(request.id).unlink(missing_ok=True)
        told: dict[str, Any] = json.loads(answer.read_text())
        answer.unlink(missing_ok=True)
        if told["error"] is not None:
            raise SinkRequestFailed(told["error"], next_step=told["next_step"])
        return dict(told["result"])

    def unanswered(self) -> Iterator[SinkRequest]:
        """Those that nobody has done yet and somebody waits for, the oldest first."""
        try:
            found = sorted(self._requests.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        except OSError:
            return
        for path in found:
            try:
                value = json.loads(path.read_text())
                request = SinkRequest(**(value | {"kind": SinkRequestKind(value["kind"])}))
                if request.until is None or request.until < time.time():
                    raise TimeoutError
            except (OSError, ValueError, TypeError, KeyError):
                path.unlink(missing_ok=True)
            else:
                yield request

    def answer(self, request: SinkRequest, error: HeadwaterError | None, result: dict[str, Any] | None = None) -> None:
        """Say what became of *request*."""
        problem = (None, None) if error is None else (error.message, error.next_step)
        replace_private(
            self._answer(request.id),
            json.dumps({"error": problem[0], "next_step": problem[1], "result": result or {}}),
            durable=True,
        )
        self._path(request.id).unlink(missing_ok=True)
        for old in self._requests.glob("*.answer"):  # of those who did not wait
            if time.time() - old.stat().st_mtime > _FORGET_SECONDS:
                old.unlink(missing_ok=True)

    def wish(self, label: str) -> SinkWish:
        """What was asked of the sink for good."""
        try:
            return SinkWish(**json.loads((self._sinks / f"{label}.json").read_text()))
        except FileNotFoundError:
            return SinkWish()

    def put_wish(self, label: str, wish: SinkWish) -> None:
        """Keep it; durable on return."""
        make_private(self._sinks)
        replace_private(self._sinks / f"{label}.json", json.dumps(asdict(wish)), durable=True)

    def _path(self, request: str) -> Path:
        return self._requests / f"{request}.json"

    def _answer(self, request: str) -> Path:
        return self._requests / f"{request}.answer"
