"""Capture: follows one database into one store until it is told to stop, through every failure that passes.

==========  ============================================  ==========================================
state       meaning                                       goes to
==========  ============================================  ==========================================
starting    the store or the source is being opened       running, waiting, stopped
running     changes flow                                  waiting, stopped
waiting     a passing failure: it tries again             starting, stopped
stopped     it was told to, or a person must act          (the end)
==========  ============================================  ==========================================

A failure that passes (:data:`~headwater.errors.PASSING`: no answer, a full disk, and after the first session also a
refused login) throws the session away and starts the next one from the last seal, after a pause that grows and is
forgotten once an epoch was sealed. Where the store itself failed it is opened again first: only a new handle knows
which epoch was sealed last. Any other failure ends the capture: it is raised with what to do. The store's fence keeps a
second capture out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from headwater.capture.options import CaptureOptions
from headwater.capture.session import CaptureSession
from headwater.capture.source_state import SourceState
from headwater.capture.statistics import CaptureStatistics
from headwater.control.command import RecaptureSource
from headwater.control.request import Request, inbox_of, leave
from headwater.errors import PASSING, CapacityError, HeadwaterError, LoginError, TransientError
from headwater.sources.source import Source
from headwater.state import StateStore, open_writer
from headwater.state.errors import StateError
from headwater.system.retry import Backoff

_WAITS = "The capture waits and goes on when there is room."


class CaptureState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _elapsed_ms() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps
    return time.clock_gettime(clock) * 1000


def _now_us() -> int:
    return time.time_ns() // 1000


class Capture:
    """One database into one store.

    :param tables: captured beside those that the store knows already.
    :param renew: prepare the source anew, after a gap, and capture all tables from there on; see
        :mod:`headwater.capture.renewal`.
    :param now_ms: the clock of epochs and of retention, milliseconds since 1970; the wall clock without its jumps.
    :param on_sealed: called with the epochs of rows once they are sealed, in a thread that must not be held up.
    :param random_share: of a pause that is waited, between 0 and 1; injected for tests.
    """

    def __init__(
        self,
        source: Source,
        location: str | Path,
        tables: Sequence[str],
        options: CaptureOptions | None = None,
        *,
        now_ms: Callable[[], int] | None = None,
        on_sealed: Callable[[int], None] = lambda _: None,
        random_share: Callable[[], float] = random.random,
        takeover: bool = False,
        renew: bool = False,
    ) -> None:
        self._source = source
        self._location = location
        self._tables = list(tables)
        self._options = options or CaptureOptions()
        self._now_ms = now_ms or SteadyClock(_now_ms, _elapsed_ms)
        self._on_sealed = on_sealed
        self._random_share = random_share
        self._takeover = takeover
        self._renew = renew
        self._stop = threading.Event()
        self._failures = 0
        self._has_run = self._is_full = False
        self.state = CaptureState.STARTING
        self.statistics = CaptureStatistics()
        self._inbox = inbox_of(str(location))

    @property
    def source(self) -> Source:
        return self._source

    def lag_seconds(self) -> float | None:
        """At most how old the oldest change of the source is that is not durable here; ``None``: unknown."""
        return self.statistics.lag_seconds(_now_us()) if self.state is CaptureState.RUNNING else None

    def stop(self) -> None:
        """End at the next boundary; any thread, also a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Until :meth:`stop`, or a failure that needs a person.

        :raises HeadwaterError: what to do is its next step. The next start goes on from the last seal.
        """
        try:
            while not self._stop.is_set():
                try:
                    self.state = CaptureState.STARTING
                    with open_writer(self._location, takeover=self._takeover) as store:
                        self._follow(store)
                except (TransientError, CapacityError) as error:
                    self._wait(error)
        except HeadwaterError as error:
            self.statistics.last_error = str(error)
            raise
        finally:
            self.state = CaptureState.STOPPED
            self._source.close()

    def _follow(self, store: StateStore) -> None:
        """Sessions over one handle of the store, until :meth:`stop`. :raises StateError: open the store again."""
        self._takeover = False
        if self._renew:
            leave(self._location, Request(RecaptureSource()))
            self._renew = False
        while not self._stop.is_set():
            try:
                self._session(store)
            except StateError:
                raise
            except PASSING as error:
                if isinstance(error, LoginError):
                    if not self._has_run:
                        raise
                    self._source.close()  # the next session logs in again, with the password of then
                self._wait(error)

    def _session(self, store: StateStore) -> None:
        self.state = CaptureState.STARTING
        session = CaptureSession(
            self._source,
            store,
            self._tables,
            self._options,
            self.statistics,
            self._now_ms,
            self._inbox,
            self._on_sealed,
        )
        with store.snapshot() as view:
            record, _ = SourceState.read(view)
        self.statistics.begin(_now_us(), 0 if record is None else record.commit_time_us)
        self._tables = []  # the store knows them by now; one that stops or is gone later does not end the others
        sealed = self.statistics.epoch
        try:
            self.state, self._has_run = CaptureState.RUNNING, True
            while not self._stop.is_set():
                if session.at_boundary:
                    session.serve(self._inbox.open(session.answers))
                if session.wants_restart:
                    break
                session.step()
                if self.statistics.epoch > sealed:
                    self._failures, self._is_full = 0, False
                self.statistics.stepped(_now_us(), is_over=not self._is_full)
            session.finish()
        finally:
            session.close()

    def _wait(self, error: HeadwaterError) -> None:
        self.state = CaptureState.WAITING
        self._is_full = isinstance(error, CapacityError)
        self.statistics.last_error = f"{error} {_WAITS}" if self._is_full else str(error)
        self.statistics.restarts += 1
        self._failures += 1
        backoff = Backoff(base=1, factor=2, maximum=self._options.retry_seconds)
        self._stop.wait(backoff.delay(self._failures, self._random_share))


_FASTEST: Final = 2.0
_SLOWEST: Final = 0.5


class SteadyClock:
    """Milliseconds since 1970 that never go back and never jump; any thread.

    It starts with the wall clock. When that jumps, it runs up to twice as fast as time passes, or half as fast, until
    both agree again. So a clock that is wrong for a minute moves epochs by a minute at most, and a log never ages by
    years at once.

    :param wall_ms: the wall clock, milliseconds since 1970.
    :param elapsed_ms: a clock that is never set; also counts while the machine sleeps, if it can.
    """

    def __init__(self, wall_ms: Callable[[], int], elapsed_ms: Callable[[], float]) -> None:
        self._wall_ms, self._elapsed_ms = wall_ms, elapsed_ms
        self._lock = threading.Lock()
        self._at, self._read = float(wall_ms()), elapsed_ms()

    def __call__(self) -> int:
        with self._lock:
            read = self._elapsed_ms()
            passed = max(0.0, read - self._read)
            self._at = min(max(self._wall_ms(), self._at + _SLOWEST * passed), self._at + _FASTEST * passed)
            self._read = read
            return int(self._at)
