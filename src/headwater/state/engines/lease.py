"""Ownership on an object store: numbered claims, made by put-if-absent, kept alive by a heartbeat.

``owner/<generation>.json`` is one claim; the highest generation owns the store. A claim is alive while its process
lives (asked of the kernel, where it is the same kernel and the same pid namespace) or, from anywhere else, while its
heartbeat is younger than :data:`LEASE`. Exactly one of several claimants wins a generation, because the object can be
made only once.

A process that gives up a claim, because the object store did not answer, can claim the store again at once; others
see the claim as alive until the process ends or claims again.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, fields, replace
from datetime import datetime

from headwater.state.engines.slate import Place
from headwater.state.errors import StateError, StoreOwned
from headwater.state.store import Owner
from headwater.system.process import ProcessName, host_name, started

LEASE = 30.0
"""Seconds after the last heartbeat at which a writer on another machine counts as dead."""

HEARTBEAT = 5.0

_PREFIX = "owner/"

_given_up: set[str] = set()
"""The ids of claims that this process has made, or tried to make, and holds no more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One writer's claim on a store; a claim without namespace and ticks is judged by its heartbeat alone."""

    generation: int
    host: str
    pid: int
    started: datetime
    boot: str
    beat: float
    closed: bool = False
    namespace: int = 0
    ticks: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        return f"{_PREFIX}{self.generation:020}.json"

    def owner(self) -> Owner:
        return Owner(self.generation, self.host, self.pid, self.started)

    def alive(self, now: float) -> bool:
        if self.closed or self.id in _given_up:
            return False
        running = self._running()
        return now - self.beat < LEASE if running is None else running

    def ended(self) -> bool:
        """Whether the writer has ended for certain: it said so, or the kernel does. Silence does not count."""
        return self.closed or self._running() is False

    def _running(self) -> bool | None:
        """What the kernel knows about the process; ``None`` when it is not the one to ask."""
        return ProcessName(self.pid, self.boot, self.namespace, self.ticks).is_running()

    def to_bytes(self) -> bytes:
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(stored | {"started": self.started.isoformat()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Claim:
        stored = json.loads(data)
        known = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
        return cls(**(known | {"started": datetime.fromisoformat(stored["started"])}))


def current_claim(place: Place) -> Claim | None:
    """The claim of the highest generation."""
    while names := place.names(_PREFIX):
        data = place.read(names[-1])
        if data is not None:
            return Claim.from_bytes(data)
        # the next owner has taken it away since the listing: look again
    return None


def owns(place: Place, mine: Claim) -> bool:
    """Whether nobody has claimed the store since."""
    names = place.names(_PREFIX)
    return not names or names[-1] <= mine.name


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
        own = ProcessName.own()
        mine = Claim(
            generation=generation,
            host=host_name(),
            pid=own.pid,
            started=started(),
            boot=own.boot,
            beat=now,
            namespace=own.namespace,
            ticks=own.ticks,
            id=uuid.uuid4().hex,
        )
        try:
            if place.create(mine.name, mine.to_bytes()):
                for name in place.names(_PREFIX):
                    if name < mine.name:
                        place.delete(name)
                return mine
        except StateError:
            give_up(mine)  # the claim can have been made all the same
            raise


def beat(place: Place, mine: Claim) -> bool:
    """Renew the claim; ``False`` when a higher generation exists."""
    if not owns(place, mine):
        return False
    place.write(mine.name, replace(mine, beat=time.time()).to_bytes())
    return True


def give_up(mine: Claim) -> None:
    """Let this process claim the store again, without a word to others."""
    _given_up.add(mine.id)


def release(place: Place, mine: Claim) -> None:
    """Say that this writer has ended, so that the next one need not wait."""
    give_up(mine)
    names = place.names(_PREFIX)
    if names and names[-1] == mine.name:
        place.write(mine.name, replace(mine, beat=time.time(), closed=True).to_bytes())
