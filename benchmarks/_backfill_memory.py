"""The most memory that each kind of process has had: the kernel keeps it, a thread collects it before they end."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Self

_SECONDS = 0.2

CAPTURE, WORKER, JAVA = "capture", "worker", "Java"
_ROLES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (CAPTURE, lambda command: "capture_child" in command),
    (JAVA, lambda command: "org.apache.spark" in command),
    (WORKER, lambda command: "pyspark.daemon" in command or "pyspark.worker" in command),
)


class PeakMemory:
    """While it is open: the resident set at its highest of every descendant of this process, by role."""

    def __init__(self) -> None:
        self._peaks: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="memory", daemon=True)

    def __enter__(self) -> Self:
        for pid in descendants(os.getpid()):
            _forget_peak(pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def of(self, role: str) -> int:
        """Bytes of the largest process of *role*; 0 when there was none."""
        return max(self._peaks[role].values(), default=0)

    def _collect(self) -> None:
        while True:
            for pid in descendants(os.getpid()):
                self._look(pid)
            if self._ended.wait(_SECONDS):
                return

    def _look(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            peak = int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        except (OSError, ValueError, IndexError):
            return
        for role, fits in _ROLES:
            if fits(command):
                self._peaks[role][pid] = max(self._peaks[role].get(pid, 0), peak)
                return


def _forget_peak(pid: int) -> None:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        pass  # it has ended, or is another user's


def descendants(pid: int) -> list[int]:
    """The processes that *pid* has started, and those have."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children[parent].append(int(entry.name))
    found, open_pids = [], [pid]
    while open_pids:
        following = children.get(open_pids.pop(), [])
        found += following
        open_pids += following
    return found
