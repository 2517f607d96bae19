"""Children: processes of ours beside one of Spark's, which end with it whatever happens to it.

A child gets what it needs as one line of JSON on its standard input, never as an argument that others could see, and
tells how it goes in lines of JSON. It ends when that input does, and the kernel is asked to tell it, too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from headwater.errors import HeadwaterError
from headwater.stopping import STOP_SECONDS, end_after, stop_on_signals

_PR_SET_PDEATHSIG: Final = 1
_END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01


class Child:
    """Runs ``main`` of *module* as a process of its own.

    :param told: what it gets; it may hold secrets.
    :param forks: it may be a copy of this process, which has loaded what it needs; another Python takes half a second.
    """

    def __init__(self, module: str, told: dict[str, Any], *, forks: bool = False) -> None:
        self._process = _Forked(module) if forks and threading.active_count() == 1 else _started(module)
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


def _started(module: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from {module} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )


class _Forked:
    """A copy of this process that runs ``main`` of *module*, and has nothing else in common with it.

    As :class:`subprocess.Popen`, as far as that is needed. Only where no thread may hold a lock that is never let go.
    """

    def __init__(self, module: str) -> None:
        self.returncode: int | None = None
        main = importlib.import_module(module).main
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(main, its_input, its_output)
        os.close(its_input)
        os.close(its_output)
        self.stdin = os.fdopen(our_output, "w")
        self.stdout = os.fdopen(our_input)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # nobody keeps how it ended: Spark's workers ignore that
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("child", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become(main: Callable[[], None], its_input: int, its_output: int) -> NoReturn:
    """In the copy: let go of all that is the other's, run *main*, and end."""
    code = 1
    try:
        gc.freeze()  # what the other has open is not for us to close
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python: a socket that was closed is an error
        nowhere = os.open(os.devnull, os.O_RDWR)
        for ours, its in ((its_input, 0), (its_output, 1), (nowhere, 2)):
            os.dup2(ours, its)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        main()
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


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
    """In a child: call *stop* when the parent ends, closes our input, or somebody asks us to end.

    A child that does not stop then is ended, see :mod:`headwater.stopping`.
    """
    stop_on_signals(stop, signal.SIGTERM)
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
    end_after(STOP_SECONDS)
