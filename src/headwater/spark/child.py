"""Children: processes of ours beside one of Spark's, which end with it whatever happens to it.

A child gets what it needs as one line of JSON on its standard input, never as an argument that others could see, and
tells how it goes in lines of JSON. It ends when that input does, and the kernel is asked to tell it, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from headwater.errors import HeadwaterError

_PR_SET_PDEATHSIG: Final = 1
_END_SECONDS: Final = 10.0


class Child:
    """Runs ``main`` of *module* as a process of its own.

    :param told: what it gets; it may hold secrets.
    """

    def __init__(self, module: str, told: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended at once: what it told says why

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def line(self, timeout: float) -> dict[str, Any] | None:
        """The next thing that it tells; ``None`` when there is none in time, or it has ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        text = self._process.stdout.readline() if ready else ""
        read: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return read

    def leave(self) -> None:
        """Let it run after this process has ended, until it ends by itself; it must not end with its input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.returncode = 0  # not ours to wait for any more

    def close(self) -> None:
        """End it: it is asked, and killed if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def received() -> dict[str, Any]:
    """In a child: what it got."""
    read: dict[str, Any] = json.loads(sys.stdin.readline())
    return read


def tell(line: dict[str, Any]) -> None:
    """In a child: tell something, if anybody still listens."""
    try:
        print(json.dumps(line), flush=True)
    except BrokenPipeError:
        pass


def tell_error(error: HeadwaterError) -> None:
    """In a child: tell why it ends."""
    tell({"error": error.message, "next_step": error.next_step, "kind": type(error).__name__})


def end_with_parent(stop: Callable[[], None]) -> None:
    """In a child: call *stop* when the parent ends, closes our input, or somebody asks us to end."""
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ask_for_signal(signal.SIGTERM)
    threading.Thread(target=_watch, args=(stop,), daemon=True).start()


def ask_for_signal(number: int) -> None:
    """Ask the kernel for a signal when the parent ends; where it cannot, nothing happens."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        pass


def _watch(stop: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()
