"""Ownership on an object store: numbered claims, made by put-if-absent, kept alive by a heartbeat.

``owner/<generation>.json`` is one claim; the highest generation owns the store. A claim is alive while its process
lives (asked of the kernel on the same machine) or, from another machine, while its heartbeat is younger than
:data:`LEASE`. Exactly one of several claimants wins a generation, because the object can be made only once.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from headwater.state.engines.slate import Place
from headwater.state.errors import StoreOwned
from headwater.state.ownership import host_name, process_start
from headwater.state.store import Owner

LEASE = 30.0
"""Seconds after the last heartbeat at which a writer on another machine counts as dead."""

HEARTBEAT = 5.0

_PREFIX = "owner/"


def boot_id() -> str:
    """Which boot of which machine this is; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One writer's claim on a store."""

    generation: int
    host: str
    pid: int
    started: datetime
    boot: str
    beat: float
    closed: bool = False

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.generation:020}.json"

    def owner(self) -> Owner:
        return Owner(self.generation, self.host, self.pid, self.started)

    def alive(self, now: float) -> bool:
        if self.closed:
            return False
        if self.boot and self.boot == boot_id():
            running = Path(f"/proc/{self.pid}").exists()
            return running and abs((process_start(self.pid) - self.started).total_seconds()) < 2.0
        return now - self.beat < LEASE

    def to_bytes(self) -> bytes:
        fields = {
            "generation": self.generation,
            "host": self.host,
            "pid": self.pid,
            "started": self.started.isoformat(),
            "boot": self.boot,
            "beat": self.beat,
            "closed": self.closed,
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Claim:
        fields = json.loads(data)
        return cls(**(fields | {"started": datetime.fromisoformat(fields["started"])}))


def current_claim(place: Place) -> Claim | None:
    """The claim of the highest generation."""
    names = place.names(_PREFIX)
    data = place.read(names[-1]) if names else None
    return Claim.from_bytes(data) if data else None


def claim(place: Place, *, takeover: bool) -> Claim:
    """Become the owner.

    :raises StoreOwned: a live writer owns the store and *takeover* was not asked for.
    """
    while True:
        old = current_claim(place)
        now = time.time()
        if old is not None and old.alive(now) and not takeover:
            raise StoreOwned(place.location, old.host, old.pid, old.started)
        generation = old.generation + 1 if old else 1
        mine = Claim(generation, host_name(), os.getpid(), process_start(), boot_id(), now)
        if place.create(mine.name, mine.to_bytes()):
            for name in place.names(_PREFIX):
                if name < mine.name:
                    place.delete(name)
            return mine


def beat(place: Place, mine: Claim) -> bool:
    """Renew the claim; ``False`` when a higher generation exists."""
    names = place.names(_PREFIX)
    if names and names[-1] > mine.name:
        return False
    place.write(mine.name, replace(mine, beat=time.time()).to_bytes())
    return True


def release(place: Place, mine: Claim) -> None:
    """Say that this writer has ended, so that the next one need not wait."""
    names = place.names(_PREFIX)
    if names and names[-1] == mine.name:
        place.write(mine.name, replace(mine, beat=time.time(), closed=True).to_bytes())
