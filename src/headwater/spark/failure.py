"""Failure: an error on its way from another process, through Spark's text or a line of JSON, and when what failed is
started again. Pure: no clock, no threads.

Spark hands on an exception of its Python processes as a text with a traceback in it. What the caller must do would be
lost on that way, so :func:`told` wraps our own errors in one whose text is machine-readable.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, ParamSpec, Self, TypeVar

from headwater.errors import CapacityError, FencedError, HeadwaterError, LoginError, TransientError
from headwater.system.frames import frames_in, traceback_of
from headwater.system.retry import RESTART, Backoff

P = ParamSpec("P")
R = TypeVar("R")

_MARK: Final = "headwater-failure "
_PASSING: Final = (
    "EOFException",
    "OptionalDataException",  # half an answer of a worker that was killed
    "StreamCorruptedException",
    "(no cause message)",
    "Py4JNetworkError",
    "Python worker exited unexpectedly",
    "Python worker failed to connect back",  # a busy machine, or one without a free port
    "Python worker faulthandler",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Stream closed",  # of the daemon that starts workers, which was killed
    "SocketException",
    "SparkContext was shut down",
    "stopped SparkContext",
    "ExecutorLostFailure",
    "Remote RPC client disassociated",
    "Answer from Java side is empty",
    "An error occurred while trying to connect to the Java server",
)

UNSURE_ATTEMPTS: Final = 5
"""How often a failure of an unknown kind is retried before a person must act."""
_FULL: Final = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_MAKE_ROOM: Final = "Make room on the disk; it goes on by itself."


class Remedy(Enum):
    """What is done about a failure.

    ``RETRY``: it passes: again, with growing pauses, for as long as it takes. ``UNSURE``: again, but not for ever.
    ``LOGIN``: the login was refused: as ``RETRY`` where it worked before, otherwise as ``PERSON``. ``PERSON``: somebody
    must act first.
    """

    RETRY = "retry"
    UNSURE = "unsure"
    LOGIN = "login"
    PERSON = "person"


@dataclass(frozen=True, slots=True)
class Failure:
    """What happened elsewhere.

    :ivar kind: the name of the error's class. :ivar trace: where it was raised, for the trace of a run.
    """

    kind: str
    remedy: Remedy
    message: str
    next_step: str | None = None
    trace: str = field(default="", compare=False)

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What *error*, of ours or of Spark, says, and what is to be done about it."""
        trace = traceback_of(error)
        if isinstance(error, HeadwaterError):
            return replace(cls._of_ours(error), trace=trace)
        text, remote = str(error), "\n".join(_traces(error))
        parts = (frames_in(f"{text}\n{remote}"), trace)
        return replace(cls.of_text(type(error).__name__, text, remote), trace="\n\n".join(filter(None, parts)))

    @classmethod
    def _of_ours(cls, error: HeadwaterError) -> Self:
        if _has_no_room(error):
            return cls(type(error).__name__, Remedy.RETRY, error.message, _MAKE_ROOM)
        if isinstance(error, TransientError | CapacityError):
            remedy = Remedy.RETRY
        elif isinstance(error, LoginError):
            remedy = Remedy.LOGIN
        elif isinstance(error, FencedError):
            remedy = Remedy.UNSURE
        else:
            remedy = Remedy.PERSON
        return cls(type(error).__name__, remedy, error.message, error.next_step)

    @classmethod
    def of_text(cls, kind: str, text: str, trace: str = "") -> Self:
        """What the text of an error says; one of ours that :func:`told` wrapped is found in it.

        :param trace: of Java, which may tell more than the text.
        """
        whole = f"{text}\n{trace}"
        place = whole.rfind(_MARK)
        if place >= 0:
            try:
                found, _ = json.JSONDecoder().raw_decode(whole[place + len(_MARK) :])
                return cls.from_json(found)
            except (ValueError, KeyError):
                pass
        told = _error_of_task(whole)
        message = told or (f"{kind}: {_telling(text)}" if text else kind)
        kind = kind if told is None else told.partition(":")[0].rpartition(".")[2]
        if any(words in whole for words in _FULL):
            return cls(kind, Remedy.RETRY, message, _MAKE_ROOM)
        passing = next((words for words in _PASSING if words in whole), None)
        if passing is not None:
            return cls(kind, Remedy.RETRY, f"A process of Spark ended, or lost its connection ({passing}).")
        return cls(kind, Remedy.UNSURE, message)

    def to_json(self) -> dict[str, Any]:
        """All but the trace."""
        remedy = self.remedy.value
        return {"kind": self.kind, "remedy": remedy, "message": self.message, "next_step": self.next_step}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """:raises KeyError: a part is missing. :raises ValueError: no such remedy."""
        return cls(value["kind"], Remedy(value["remedy"]), value["message"], value["next_step"])

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}" if self.next_step else self.message


class RestartPolicy:
    """Pauses that grow with each failure, and are forgotten once there was progress.

    :param backoff: how long the pauses are. :param random_share: between 0 and 1; injected for tests.
    """

    def __init__(self, backoff: Backoff = RESTART, random_share: Callable[[], float] = random.random) -> None:
        self._backoff, self._random_share = backoff, random_share
        self._failures = 0
        self._has_started = False

    def started(self) -> None:
        """It could log in: a login that is refused later passes."""
        self._has_started = True

    def progressed(self) -> None:
        """It works: the next failure is the first one."""
        self._failures = 0

    def pause(self, failure: Failure) -> float | None:
        """Seconds to wait before the next start; ``None``: do not start it again."""
        if failure.remedy is Remedy.PERSON or (failure.remedy is Remedy.LOGIN and not self._has_started):
            return None
        self._failures += 1
        if failure.remedy is Remedy.UNSURE and self._failures > UNSURE_ATTEMPTS:
            return None
        return self._backoff.delay(self._failures, self._random_share)


class ToldError(RuntimeError):
    """One of our errors, as a text that survives Spark."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(_MARK + json.dumps(failure.to_json()))


def told(function: Callable[P, R]) -> Callable[P, R]:
    """*function*, whose errors of our tree can be read again on the other side of Spark."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HeadwaterError as error:
            raise ToldError(Failure.of(error)) from error

    return wrapped


def _traces(error: BaseException | None) -> Iterator[str]:
    """What an exception of Spark knows beside its text, and its causes."""
    while error is not None:
        yield str(getattr(error, "_stackTrace", None) or "")
        error = getattr(error, "_cause", None) or error.__cause__
        yield "" if error is None else f"{type(error).__name__}: {error}"


def _has_no_room(error: BaseException) -> bool:
    """Whether a full disk is why it could not be written, whatever the error that says so."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _error_of_task(text: str) -> str | None:
    """The error at the end of the last Python traceback in *text*; ``None``: there is no traceback."""
    found = None
    is_inside = False
    for line in text.splitlines():
        if "Traceback (most recent call last):" in line or line == "Traceback:":
            is_inside = True
        elif is_inside and line.strip() and not line[0].isspace():
            is_inside = False
            found = line.strip()[:500]
    return found


def _telling(text: str) -> str:
    """The first line that is not empty."""
    return next((line.strip()[:500] for line in text.splitlines() if line.strip()), "")
