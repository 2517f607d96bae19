"""The life of a sink: built, fed from its log, and after an error built again.

==============  ==========================================================================  ==================
phase           what happens                                                                goes to
==============  ==========================================================================  ==================
``WAITING``     for the writer of the log to begin, or to take over other vnodes            ``DELIVERING``
``DELIVERING``  the sink is built, and fed until an error, a request or the writer's stop   all others
``RETRYING``    the error was reported; the log is rewound, then the sink's own delay       ``DELIVERING``
``ENDED``       stopped, by the writer or by request
``FAILED``      ended by an error that no retry can mend
==============  ==========================================================================  ==================

The writer of the log notices nothing of a sink that fails. Only four kinds of errors end the loop: the sink is fenced,
stored bytes are damaged, the log no longer holds what the sink needs, and any error where the log cannot be rewound.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from headwater.errors import CorruptionError, FencedError, HeadwaterError
from headwater.log_store.errors import EpochGone, LogClosed, VnodesMoved
from headwater.log_store.protocols import LogReader
from headwater.sinks.backoff import SinkBackoff
from headwater.sinks.control import SinkControl
from headwater.sinks.delivery import POLL_SECONDS, Delivery, Ended
from headwater.sinks.errors import NotRewindable

logger = logging.getLogger(__name__)

FINAL_ERRORS = (FencedError, CorruptionError, EpochGone)


class SinkPhase(Enum):
    WAITING = "waiting"
    DELIVERING = "delivering"
    RETRYING = "retrying"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SinkFailure:
    """One failed attempt.

    :ivar number: counts the failures of this sink from 1.
    :ivar lived_seconds: how long the attempt lived.
    """

    error: Exception
    number: int
    lived_seconds: float

    @property
    def summary(self) -> str:
        """One line for a journal or a log. Of foreign errors it has the type only: their text may hold row values."""
        name = type(self.error).__name__
        return f"{name}: {self.error}" if isinstance(self.error, HeadwaterError) else name


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """How a sink is.

    :ivar starts: how often it was built.
    :ivar rewind_seconds: what the log's rewinds took; *backoff_seconds* the sink's own delays.
    """

    phase: SinkPhase = SinkPhase.WAITING
    starts: int = 0
    failures: int = 0
    rewinds: int = 0
    rewind_seconds: float = 0.0
    backoff_seconds: float = 0.0
    last_failure: SinkFailure | None = None


class SinkLoop:
    """Feeds one sink from one reader, for ever.

    :param build: makes the sink from its settings; what it raises is an error as any other.
    :param allow_rewind: what the factory of the log says (``ALLOW_REWIND``).
    :param on_failure: told of each failure before anything is waited for; what it raises is logged and forgotten.
    :param jitter: gives a number in [0, 1) for each delay.
    """

    def __init__(
        self,
        reader: LogReader,
        build: Callable[[Mapping[str, str]], Delivery],
        control: SinkControl | None = None,
        *,
        allow_rewind: bool = True,
        on_failure: Callable[[SinkFailure], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.control = control or SinkControl()
        self._reader = reader
        self._build = build
        self._allow_rewind = allow_rewind
        self._on_failure = on_failure
        self._clock = clock
        self._backoff = SinkBackoff(jitter)
        self._sleep = sleep or self.control.sleep
        self._status = SinkStatus()
        self._lock = threading.Lock()
        self._is_reset = False

    @property
    def status(self) -> SinkStatus:
        """How the sink is now; of any thread."""
        with self._lock:
            return self._status

    def run(self) -> None:
        """Deliver until the writer of the log stops, or :meth:`SinkControl.stop`. The reader is closed then.

        :raises NotRewindable: other settings, on a log that cannot be rewound. Begin again with them.
        Whatever ends the sink for good is raised as it came.
        """
        try:
            self._wait_for_writer()
            while not self.control.is_stopping:
                if self.control.must_hand_over:
                    self.control.release()
                    self._wait_for_writer()
                elif self._attempt() is Ended.STOPPED:
                    break
        except BaseException:
            self._note(phase=SinkPhase.FAILED)
            raise
        else:
            self._note(phase=SinkPhase.ENDED)
        finally:
            self._reader.close()
            self.control.end()

    def _wait_for_writer(self) -> None:
        self._note(phase=SinkPhase.WAITING)
        while not self.control.is_stopping:
            try:
                self._reader.init(POLL_SECONDS)
            except LogClosed:
                continue
            self._is_reset = True
            return

    def _attempt(self) -> Ended | None:
        """One life of the sink; ``None`` if it failed, and what must come before the next was done."""
        began = self._clock()
        delivery: Delivery | None = None
        try:
            if self._is_reset:
                self._reader.start_from()
                self._is_reset = False
            delivery = self._build(self.control.settings())
            self._note(phase=SinkPhase.DELIVERING, starts=self._status.starts + 1)
            ended = delivery.run(self._reader, self.control)
        except VnodesMoved:
            _discard(delivery)
            self._wait_for_writer()
            return None
        except Exception as error:
            _discard(delivery)
            self._retry(error, self._clock() - began)
            return None
        except BaseException:
            _discard(delivery)
            raise
        _discard(delivery)
        if ended is Ended.ASKED and not self.control.is_stopping and not self.control.must_hand_over:
            self._begin_anew()
        return ended

    def _begin_anew(self) -> None:
        """Other settings: what the sink took and did not commit must come again for the one that follows it."""
        if not self._allow_rewind:
            raise NotRewindable(
                "The settings of this sink changed, and its log cannot be rewound.",
                next_step="Stop the writer of the log and begin again with the new settings.",
            )
        self._rewind()

    def _retry(self, error: Exception, lived: float) -> None:
        failure = SinkFailure(error, self._status.failures + 1, lived)
        self._note(phase=SinkPhase.RETRYING, failures=failure.number, last_failure=failure)
        self._report(failure)
        if not self._allow_rewind or isinstance(error, FINAL_ERRORS):
            raise error
        if self.control.is_stopping:
            return
        try:
            self._rewind()
        except Exception as failed:
            raise error from failed
        delay = self._backoff.next(lived)
        self._note(backoff_seconds=self._status.backoff_seconds + delay)
        self._sleep(delay)

    def _rewind(self) -> None:
        waited = self._reader.rewind()
        self._is_reset = True
        self._note(rewinds=self._status.rewinds + 1, rewind_seconds=self._status.rewind_seconds + waited)

    def _report(self, failure: SinkFailure) -> None:
        if self._on_failure is None:
            return
        try:
            self._on_failure(failure)
        except Exception as error:
            logger.warning("The failure of a sink could not be reported: %s.", type(error).__name__)

    def _note(self, **changes: object) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]


def _discard(delivery: Delivery | None) -> None:
    if delivery is None:
        return
    try:
        delivery.abort()
    except Exception as error:
        logger.warning("A sink could not be aborted: %s.", type(error).__name__)
