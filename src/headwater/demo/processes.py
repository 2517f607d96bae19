"""The processes of the demo: in sessions of their own, so that Ctrl-C is the demo's alone, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from headwater.system.process import status_fields

_PARENT_FIELD = 1


class DemoProcess:
    """A Python process and all that it starts.

    :param hurry: when it is set, nobody waits for the end of the process any longer.
    """

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str], folder: Path, output: Path, hurry: Event
    ) -> None:
        self.output = output
        self._hurry = hurry
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def has(self, pid: int) -> bool:
        """Whether *pid* is a process that it has started."""
        return pid in descendants(self._process.pid)

    def tail(self, lines: int = 20) -> str:
        """The end of what it wrote."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, seconds: float) -> None:
        """Ask it to end and wait for that; then end what is left of it and of all that it has started."""
        if not self.is_running:
            return
        pids = [self._process.pid, *descendants(self._process.pid)]
        self._process.send_signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end and not self._hurry.is_set():
            time.sleep(0.02)
        pids += descendants(self._process.pid)
        for pid in pids:
            _end(pid)
        self._process.wait()
        deadline = time.monotonic() + 10
        while any(status_fields(pid)[:1] not in ([], ["Z"]) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """The processes that *pid* has started, and those that they have started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := status_fields(int(entry.name))):
            parents.setdefault(int(fields[_PARENT_FIELD]), []).append(int(entry.name))
    found: list[int] = []
    wanted = [pid]
    while wanted:
        children = parents.get(wanted.pop(), [])
        found += children
        wanted += children
    return found


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
