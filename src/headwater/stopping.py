"""Ends a process that was asked to stop: at a good moment if it can, and within seconds in any case.

A thread listens for the signals. The main thread may be inside a call that returns late, such as the lookup of a host
name, and Python runs signal handlers only after it. What is durable survives the end of the process at any moment, so a
process that does not stop in time is ended as a crash would end it.

Some clients of object stores hold Python's lock while they wait for an answer. The compiled helper ends the process
then, too; where it was not built, the end comes when the client gives the lock back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from headwater import compiled

STOP_SECONDS: Final = 8.0
"""How long a process may take to stop after it was asked to."""
_GRACE_SECONDS: Final = 0.2
"""How much later the compiled helper ends it: Python ends it first if it can."""


def stop_on_signals(stop: Callable[[], None], *numbers: signal.Signals, seconds: float = STOP_SECONDS) -> None:
    """On one of the signals *numbers*, call *stop* from another thread; end the process if it lives on for *seconds*.

    Call it from the main thread, once in the life of a process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # the number goes to the pipe before any handler runs
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    reading = _watched(reading, numbers, seconds)
    threading.Thread(target=_listen, args=(reading, stop, numbers, seconds), name="headwater-stop", daemon=True).start()


def end_after(seconds: float) -> None:
    """End this process in *seconds*, whatever it does then."""
    time.sleep(seconds)
    print(_ended(seconds), file=sys.stderr, flush=True)
    os._exit(0)


def _ended(seconds: float) -> str:
    return (
        f"The process did not stop within {seconds:g} s and was ended. No action needed: the next start resumes from"
        " the last sealed epoch."
    )


def _watched(reading: int, numbers: tuple[signal.Signals, ...], seconds: float) -> int:
    """Where the numbers of signals can be read; the compiled helper, if it was built, sees them before."""
    if not compiled.is_wanted():
        return reading
    try:
        from headwater._stop_watch import start
    except ImportError:
        return reading
    forwarded, forward = os.pipe()
    start(reading, forward, sum(1 << number for number in numbers), seconds + _GRACE_SECONDS, f"{_ended(seconds)}\n")
    return forwarded


def _listen(reading: int, stop: Callable[[], None], numbers: tuple[signal.Signals, ...], seconds: float) -> None:
    while os.read(reading, 1)[0] not in numbers:
        pass
    stop()
    end_after(seconds)
