"""Which process this is, as the kernel tells: host, boot, namespace, start.

A pid alone names a process badly: it is used again, and it means another process in another container. With the boot,
the namespace of pids and the start time it names exactly one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_PARENT_FIELD: Final = 1
"""Of :func:`status_fields`."""


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """Which boot of which machine this is; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Among which processes a pid has its meaning; 0 where the kernel does not tell, or ``/proc`` shows others."""
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):
            return 0
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def status_fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on (field 3 of proc_pid_stat); empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


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


def start_ticks(pid: int) -> int:
    """When the process started, in ticks since the boot, which nobody sets; 0 where the kernel does not tell."""
    try:
        return int(status_fields(pid)[19])
    except (ValueError, IndexError):
        return 0


def started(pid: int | None = None) -> datetime:
    """When a process of this host, by default this one, started, to the second; now, where the kernel does not tell."""
    try:
        words = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        boot = next(int(line[1]) for line in words if line and line[0] == "btime")
        ticks = start_ticks(os.getpid() if pid is None else pid)
        if ticks:
            return datetime.fromtimestamp(boot + ticks // os.sysconf("SC_CLK_TCK"), UTC)
    except (OSError, ValueError, StopIteration):
        pass
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class ProcessName:
    """What tells one process from every other; what the kernel does not tell is empty or 0."""

    pid: int
    boot: str = ""
    namespace: int = 0
    ticks: int = 0

    @classmethod
    def own(cls) -> ProcessName:
        return cls(os.getpid(), boot_id(), pid_namespace(), start_ticks(os.getpid()))

    def is_running(self) -> bool | None:
        """What the kernel knows; ``None`` when it is not the one to ask."""
        known = self.boot and self.namespace and self.ticks
        if not known or (self.boot, self.namespace) != (boot_id(), pid_namespace()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it lives, under another user
        stat = status_fields(self.pid)
        if not stat:
            return None
        return stat[0] not in "ZX" and start_ticks(self.pid) == self.ticks
