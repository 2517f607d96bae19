"""Pins on an object store, where a reader cannot write to the database.

A reader asks by making ``pins/<key>.json``; the writer answers with ``acks/<key>@<nonce>.json``: the epoch, and a
SlateDB checkpoint of exactly that epoch, or that the epoch asked for is no longer there. Both are made by
put-if-absent. The nonce is the request's own, so that an answer belongs to one request for ever: a name that is
released and pinned again is another request.

No pin is lost between the two: a reader makes its request *before* it looks whether a writer is alive, and a writer
claims ownership *before* it looks for requests, so one of them sees the other. When the writer has ended for certain,
the newest epoch cannot change, and the next writer answers the request before it seals; until then the reader waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import quote, unquote

from headwater.state.engines import lease
from headwater.state.engines.slate import Place
from headwater.state.errors import EpochNotHeld, PinExists, PinNotFound, StoreUnavailable
from headwater.state.handle import check_pin_name
from headwater.state.store import Pin
from headwater.stream.epoch import Epoch
from headwater.system.process import host_name

ANSWER_SECONDS = 15.0

_PINS = "pins/"
_ACKS = "acks/"
_LONGEST_KEY = 150


class Answering(Protocol):
    """What the board needs of the writer."""

    def checkpoint(self) -> str:
        """A checkpoint of exactly the committed epoch."""

    def confirm(self) -> None:
        """:raises WriterFenced: this writer no longer owns the store."""

    def release(self, pins: list[tuple[int, str]]) -> None:
        """Note the epochs and checkpoints of released pins, before they are forgotten here."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The writer's answer; without an epoch: what was asked for is not there."""

    epoch: Epoch | None
    checkpoint: str

    def to_bytes(self) -> bytes:
        epoch = None if self.epoch is None else int(self.epoch)
        return json.dumps({"epoch": epoch, "checkpoint": self.checkpoint}).encode()

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Ack:
        epoch = fields["epoch"]
        return cls(None if epoch is None else Epoch(epoch), fields["checkpoint"])


@dataclass(frozen=True, slots=True)
class Request:
    """A pin that somebody asked for."""

    key: str
    name: str
    nonce: str
    wanted: int | None
    host: str
    pid: int
    created: datetime

    @property
    def object_name(self) -> str:
        return f"{_PINS}{self.key}.json"

    @property
    def ack_name(self) -> str:
        return f"{_ACKS}{self.key}@{self.nonce}.json" if self.nonce else f"{_ACKS}{self.key}.json"

    def pin(self, epoch: Epoch) -> Pin:
        return Pin(self.name, epoch, self.host, self.pid, self.created)

    def to_bytes(self) -> bytes:
        fields = {
            "name": self.name,
            "nonce": self.nonce,
            "epoch": self.wanted,
            "host": self.host,
            "pid": self.pid,
            "created": self.created.isoformat(),
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_fields(cls, key: str, fields: dict[str, Any]) -> Request:
        created = datetime.fromisoformat(fields["created"])
        name, nonce = fields.get("name") or unquote(key), fields.get("nonce", "")
        return cls(key, name, nonce, fields.get("epoch"), fields["host"], fields["pid"], created)


def key_of(name: str) -> str:
    """How a pin is called among the objects.

    :raises InvalidKey: no name for a pin.
    """
    check_pin_name(name)
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONGEST_KEY else "=" + hashlib.sha256(name.encode()).hexdigest()


class PinBoard:
    """Requests and answers of one store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen: dict[str, tuple[str, dict[str, Any]]] = {}

    # -- any process -------------------------------------------------------------------------------------------

    def request(self, name: str, epoch: int | None, committed: Callable[[], Epoch]) -> Pin:
        """Ask for a pin of *epoch* (the newest by default) and wait for the answer."""
        deadline = time.monotonic() + ANSWER_SECONDS
        return self._pin(name, epoch, committed, lambda asked: self._wait(asked, committed, deadline))

    def release(self, name: str) -> None:
        """:raises PinNotFound: no such pin."""
        asked = self._asked(key_of(name))
        if asked is None:
            raise PinNotFound(f"There is no pin {name!r} in {self._place.location}.")
        self._place.delete(asked.object_name)

    def pins(self, committed: Epoch) -> tuple[Pin, ...]:
        """All pins; one without an answer yet stands at the newest epoch."""
        found = []
        acks = self._acks()
        for asked in self._requests():
            ack = acks.get(asked.ack_name, Ack(committed, ""))
            if ack.epoch is not None:
                found.append(asked.pin(ack.epoch))
        return tuple(sorted(found, key=lambda pin: (pin.epoch, pin.name)))

    def held(self) -> dict[int, Ack]:
        """The epochs that are pinned and answered, oldest first."""
        acks = self._acks()
        live = [acks[asked.ack_name] for asked in self._requests() if asked.ack_name in acks]
        found = {int(ack.epoch): ack for ack in live if ack.epoch is not None}
        return {epoch: found[epoch] for epoch in sorted(found)}

    def readable(self, committed: Epoch) -> tuple[int, ...]:
        """The epochs that can be read."""
        return tuple(sorted({*self.held(), committed}))

    # -- the writer --------------------------------------------------------------------------------------------

    def grant(self, name: str, epoch: int | None, committed: Epoch, writer: Answering) -> Pin:
        """Pin at once; call under the seal lock."""
        return self._pin(name, epoch, lambda: committed, lambda asked: self._decide(asked, committed, writer))

    def adopt(self, committed: Epoch, writer: Answering) -> None:
        """Answer new requests, and forget answers whose pin is gone; call under the seal lock."""
        acks = self._acks()  # first: an answer is younger than its request, so its request is seen if it is there
        requests = self._requests()
        for asked in requests:
            if asked.ack_name not in acks:
                acks[asked.ack_name] = self._decide(asked, committed, writer)
        live = {asked.ack_name for asked in requests}
        kept = {acks[name].checkpoint for name in live}
        gone = {name: ack for name, ack in acks.items() if name not in live}
        writer.release([(int(a.epoch or 0), a.checkpoint) for a in gone.values() if a.checkpoint not in {"", *kept}])
        for name in gone:
            self._place.delete(name)

    def _decide(self, asked: Request, committed: Epoch, writer: Answering) -> Ack:
        stored = self._ack(asked)
        if stored is not None:
            return stored
        held = self.held()
        if asked.wanted is None or asked.wanted == committed:
            ack = held.get(committed) or Ack(committed, writer.checkpoint())
        else:
            ack = held.get(asked.wanted) or Ack(None, "")
        writer.confirm()
        return self._answer(asked, ack)

    # -- asking ------------------------------------------------------------------------------------------------

    def _pin(
        self,
        name: str,
        epoch: int | None,
        committed: Callable[[], Epoch],
        answer: Callable[[Request], Ack | None],
    ) -> Pin:
        key = key_of(name)
        while True:
            asked, mine = self._asked(key), False
            if asked is None:
                if epoch is not None and epoch != (newest := committed()) and epoch not in self.held():
                    raise EpochNotHeld(epoch, self.readable(newest))
                asked, mine = self._ask(key, name, epoch), True
            if asked is None:
                continue  # somebody else made a pin of that name just now
            try:
                ack = answer(asked)
            except BaseException:
                if mine:
                    self._place.delete(asked.object_name)
                raise
            if ack is None:
                continue  # released by somebody else while we waited
            if ack.epoch is not None and (epoch is None or ack.epoch == epoch):
                return asked.pin(ack.epoch)
            if ack.epoch is not None and not mine:
                raise PinExists(f"Pin {name!r} holds epoch {ack.epoch}.", next_step="Release it first.")
            self._place.delete(asked.object_name)  # refused: no use to anybody
            if mine and epoch is not None:
                raise EpochNotHeld(epoch, self.readable(committed()))

    def _wait(self, asked: Request, committed: Callable[[], Epoch], deadline: float) -> Ack | None:
        """The answer to a request; ``None`` when the request is gone."""
        while (ack := self._ack(asked)) is None:
            owner = lease.current_claim(self._place)
            if owner is None or owner.ended():
                ack = self._without_writer(asked, committed, owner)
                if ack is not None:
                    return ack
                continue
            if self._asked(asked.key) != asked:
                return None
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"The writer of {self._place.location} (host {owner.host}, pid {owner.pid}) did not answer a pin.",
                    next_step="Try again when it is responsive, or when another has taken over.",
                )
            time.sleep(0.05)
        return ack

    def _without_writer(self, asked: Request, committed: Callable[[], Epoch], last: lease.Claim | None) -> Ack | None:
        """The answer while there is no writer after *last*, which has ended; ``None`` when there is one by now."""
        newest, held = committed(), self.held()
        ack = self._ack(asked)  # its last deed may have been the answer
        if ack is not None or lease.current_claim(self._place) != last:
            return ack
        if asked.wanted is None or asked.wanted == newest:
            return Ack(newest, "")  # the next writer answers before it seals
        return self._answer(asked, held.get(asked.wanted) or Ack(None, ""))

    # -- objects -----------------------------------------------------------------------------------------------

    def _ask(self, key: str, name: str, epoch: int | None) -> Request | None:
        """Make a request; ``None`` when there is one of that name."""
        wanted = None if epoch is None else int(epoch)
        now = datetime.fromtimestamp(time.time(), UTC)
        asked = Request(key, name, uuid.uuid4().hex, wanted, host_name(), os.getpid(), now)
        return asked if self._place.create(asked.object_name, asked.to_bytes()) else None

    def _answer(self, asked: Request, ack: Ack) -> Ack:
        """Answer a request, once: the answer that counts."""
        if not self._place.create(asked.ack_name, ack.to_bytes()):
            return self._ack(asked) or ack
        return ack

    def _asked(self, key: str) -> Request | None:
        data = self._place.read(f"{_PINS}{key}.json")
        return Request.from_fields(key, json.loads(data)) if data else None

    def _ack(self, asked: Request) -> Ack | None:
        data = self._place.read(asked.ack_name)
        return Ack.from_fields(json.loads(data)) if data else None

    def _requests(self) -> list[Request]:
        found = self._all(_PINS).items()
        return [Request.from_fields(name.removeprefix(_PINS).removesuffix(".json"), fields) for name, fields in found]

    def _acks(self) -> dict[str, Ack]:
        return {name: Ack.from_fields(fields) for name, fields in self._all(_ACKS).items()}

    def _all(self, prefix: str) -> dict[str, dict[str, Any]]:
        """The objects under *prefix*; what did not change since the last look is not read again."""
        entries = self._place.entries(prefix)
        found: dict[str, dict[str, Any]] = {}
        for name, tag in entries.items():
            seen = self._seen.get(name)
            if seen is not None and tag is not None and seen[0] == tag:
                found[name] = seen[1]
            elif (data := self._place.read(name)) is not None:
                found[name] = json.loads(data)
                self._seen[name] = (tag or "", found[name])
        for name in [name for name in list(self._seen) if name.startswith(prefix) and name not in entries]:
            self._seen.pop(name, None)
        return found
