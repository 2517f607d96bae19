"""Children: Python programs that run as processes of their own, in sessions of their own.

A child gets what it needs as one line of JSON on its standard input, never as an argument that other users could see,
and reports in lines of JSON on its standard output. A program without settings writes both of its outputs to its log.

How it ends with its parent is the child's choice: :func:`end_with_parent` stops it in order, :func:`die_with_parent`
kills it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any, Final, NoReturn, Self

from headwater.stopping import STOP_SECONDS, end_after, stop_on_signals
from headwater.system.files import open_private
from headwater.system.process import descendants, status_fields

_PR_SET_PDEATHSIG: Final = 1
_END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.01


class Child:
    """Runs Python with *arguments* as a process of its own. Start it from a thread that lives as long as it should.

    :param settings: its line of input; it can hold secrets. ``None``: it has no input, and its output goes to *log*.
    :param log: gets what it writes to its standard error; ``None``: that is discarded.
    :param folder: that it runs in. :param environment: all of its variables; ``None``: those of this process.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        settings: Mapping[str, Any] | None = None,
        *,
        log: Path | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with ExitStack() as stack:
            errors = subprocess.DEVNULL if log is None else stack.enter_context(open_private(log, "ab"))
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL if settings is None else subprocess.PIPE,
                stdout=errors if settings is None else subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                text=True,
            )
        self._begin(process, settings)

    @classmethod
    def of_module(
        cls, module: str, settings: Mapping[str, Any], *, log: Path | None = None, forks: bool = False
    ) -> Self:
        """Runs ``main`` of *module*.

        :param forks: it may be a copy of this process, which has loaded what it needs; another Python takes half a
            second. A copy has no log.
        """
        if forks and threading.active_count() == 1:
            child = cls.__new__(cls)
            child._begin(_Forked(module), settings)
            return child
        return cls(["-c", f"import sys; from {module} import main; sys.exit(main())"], settings, log=log)

    def _begin(self, process: subprocess.Popen[str] | _Forked, settings: Mapping[str, Any] | None) -> None:
        self._process = process
        self._has_reader = False
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it ended at once: its lines or its log say why
                process.stdin.write(json.dumps(settings) + "\n")
                process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs; the number of a signal that ended it is negative."""
        return self._process.poll()

    def line(self, timeout: float) -> dict[str, Any] | None:
        """Its next line; ``None`` when none arrives in time, or it has ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        text = self._process.stdout.readline() if ready else ""
        read: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return read

    def lines(self) -> Iterator[dict[str, Any]]:
        """Its lines, until it closes its output; what is not JSON is skipped. Another thread can read them."""
        self._has_reader = True
        return self._read_lines()

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        with self._process.stdout:
            for text in self._process.stdout:
                with suppress(ValueError):
                    yield json.loads(text)

    def leave(self) -> None:
        """Let it run after this process has ended, until it ends by itself; it must not end with its input."""
        self._close_input()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.returncode = 0  # another process waits for its end

    def close(self) -> None:
        """Close its input, with which it ends; kill it if it does not."""
        self._close_input()
        self._wait(_END_SECONDS)

    def stop(self) -> None:
        """Ask it to end, by a signal and the end of its input; kill it if it does not."""
        self._signal(signal.SIGTERM)
        self._close_input()
        self._wait(_END_SECONDS)

    def stop_all(self, seconds: float, hurry: Event) -> None:
        """Ask it to end, then kill what is left of it and of all that it has started.

        :param seconds: how long it has for that. :param hurry: while it is set, nobody waits for it.
        """
        if not self.is_running:
            return
        pids = [self.pid, *descendants(self.pid)]
        self._signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end and not hurry.is_set():
            time.sleep(_POLL_SECONDS)
        pids += descendants(self.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.close()
        end = time.monotonic() + _END_SECONDS
        while any(status_fields(pid)[:1] not in ([], ["Z"]) for pid in pids) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None and not self._has_reader:
            self._process.stdout.close()


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


def _become(main: Callable[[], int | None], its_input: int, its_output: int) -> NoReturn:
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
        code = main() or 0
        sys.stdout.flush()
    finally:
        os._exit(code)


def received() -> dict[str, Any]:
    """In a child: its settings."""
    read: dict[str, Any] = json.loads(sys.stdin.readline())
    return read


def report(line: Mapping[str, Any]) -> None:
    """In a child: write a line, if the parent still listens."""
    with suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)


def end_with_parent(stop: Callable[[], None]) -> None:
    """In a child: call *stop* when the parent ends, closes our input, or sends SIGTERM.

    A child that does not stop then is ended, see :mod:`headwater.stopping`.
    """
    stop_on_signals(stop, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ask_for_signal(signal.SIGTERM)
    threading.Thread(target=_watch_input, args=(stop,), daemon=True).start()


def die_with_parent(parent: int | None = None) -> None:
    """In a child: be killed when the thread that started us ends.

    :param parent: the process that started us: exit if it has ended already.
    """
    _ask_for_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def _ask_for_signal(number: int) -> None:
    """Ask the kernel for a signal when the parent ends; where it cannot, nothing happens."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch_input(stop: Callable[[], None]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()
    end_after(STOP_SECONDS)
