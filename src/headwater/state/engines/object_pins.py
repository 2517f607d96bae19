"""Pins on an object store, where a reader cannot write to the database.

A reader asks by making ``pins/<name>.json``; the writer answers with ``acks/<name>.json``: the epoch, and a SlateDB
checkpoint of exactly that epoch. No pin is lost between the two: a reader makes its request *before* it looks whether a
writer is alive, and a writer claims ownership *before* it looks for requests, so one of them sees the other. With no
writer alive the newest epoch cannot change, and the next writer answers the request before it seals.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from headwater.state.engines import lease
from headwater.state.engines.slate import Place
from headwater.state.errors import EpochNotHeld, PinExists, PinNotFound, StoreUnavailable
from headwater.state.ownership import host_name
from headwater.state.store import Pin
from headwater.stream.epoch import Epoch

ANSWER_SECONDS = 15.0

_PINS = "pins/"
_ACKS = "acks/"


@dataclass(frozen=True, slots=True)
class Ack:
    """The writer's answer."""

    epoch: Epoch
    checkpoint: str


class PinBoard:
    """Requests and answers of one store."""

    def __init__(self, place: Place) -> None:
        self._place = place

    # -- any process -------------------------------------------------------------------------------------------

    def request(self, name: str, epoch: int | None, committed: Epoch) -> Pin:
        """Ask for a pin of *epoch* (the newest by default) and wait for the answer."""
        old = self._existing(name, epoch, committed)
        if old is not None:
            return old
        shared = None
        if epoch is not None and epoch != committed:
            shared = self._ack_of(epoch)
            if shared is None:
                raise EpochNotHeld(epoch, (*self.epochs(), committed))
        made = self._ask(name, epoch)
        deadline = time.monotonic() + ANSWER_SECONDS
        while (ack := self._ack(name)) is None:
            owner = lease.current_claim(self._place)
            if owner is None or not owner.alive(time.time()):
                if shared is None:
                    return Pin(name, committed, made.host, made.pid, made.created)
                self._answer(name, shared)
                continue
            if time.monotonic() > deadline:
                self.release(name)
                raise StoreUnavailable(
                    f"The writer of {self._place.location} (host {owner.host}, pid {owner.pid}) did not answer a pin.",
                    next_step="Try again when it is responsive.",
                )
            time.sleep(0.05)
        if epoch is not None and ack.epoch != epoch:
            self.release(name)
            raise EpochNotHeld(epoch, (*self.epochs(), ack.epoch))
        return Pin(name, ack.epoch, made.host, made.pid, made.created)

    def release(self, name: str) -> None:
        """:raises PinNotFound: no such pin."""
        place = _PINS + quote(name, safe="") + ".json"
        if self._place.read(place) is None:
            raise PinNotFound(f"There is no pin {name!r} in {self._place.location}.")
        self._place.delete(place)

    def pins(self, committed: Epoch) -> tuple[Pin, ...]:
        """All pins; one without an answer yet stands at the newest epoch."""
        found = []
        for name in self._names(_PINS):
            pin = self._pin(name, committed)
            if pin is not None:
                found.append(pin)
        return tuple(sorted(found, key=lambda pin: (pin.epoch, pin.name)))

    def epochs(self) -> tuple[Epoch, ...]:
        """The epochs that are pinned and answered."""
        pinned = set(self._names(_PINS))
        acks = [ack for name in self._names(_ACKS) if name in pinned and (ack := self._ack(name)) is not None]
        return tuple(sorted({ack.epoch for ack in acks}))

    def checkpoint_of(self, epoch: int) -> str | None:
        """The checkpoint that shows *epoch*."""
        ack = self._ack_of(epoch)
        return ack.checkpoint if ack else None

    # -- the writer --------------------------------------------------------------------------------------------

    def grant(self, name: str, epoch: int | None, committed: Epoch, checkpoint: Callable[[], str]) -> Pin:
        """Pin at once; call under the seal lock."""
        old = self._existing(name, epoch, committed)
        if old is not None:
            return old
        ack = self._ack_of(committed if epoch is None else epoch)
        if ack is None:
            if epoch is not None and epoch != committed:
                raise EpochNotHeld(epoch, (*self.epochs(), committed))
            ack = Ack(committed, checkpoint())
        self._answer(name, ack)
        made = self._ask(name, epoch)
        return Pin(name, ack.epoch, made.host, made.pid, made.created)

    def adopt(self, committed: Epoch, checkpoint: Callable[[], str], drop: Callable[[str], None]) -> None:
        """Answer new requests, and forget answers whose pin is gone; call under the seal lock."""
        pinned, answered = set(self._names(_PINS)), set(self._names(_ACKS))
        for name in sorted(pinned - answered):
            wanted = self._fields(name).get("epoch") or committed
            self._answer(name, self._ack_of(wanted) or self._ack_of(committed) or Ack(committed, checkpoint()))
        gone = sorted(answered - pinned)
        if not gone:
            return
        kept = {ack.checkpoint for name in pinned if (ack := self._ack(name)) is not None}
        for name in gone:
            ack = self._ack(name)
            if ack is not None and ack.checkpoint not in kept:
                drop(ack.checkpoint)
            self._place.delete(_ACKS + quote(name, safe="") + ".json")

    # -- objects -----------------------------------------------------------------------------------------------

    def _names(self, prefix: str) -> list[str]:
        return [unquote(name.removeprefix(prefix).removesuffix(".json")) for name in self._place.names(prefix)]

    def _existing(self, name: str, epoch: int | None, committed: Epoch) -> Pin | None:
        old = self._pin(name, committed)
        if old is not None and epoch is not None and old.epoch != epoch:
            raise PinExists(f"Pin {name!r} holds epoch {old.epoch}.", next_step="Release it first.")
        return old

    def _pin(self, name: str, committed: Epoch) -> Pin | None:
        fields = self._fields(name)
        if not fields:
            return None
        ack = self._ack(name)
        created = datetime.fromisoformat(fields["created"])
        return Pin(name, ack.epoch if ack else committed, fields["host"], fields["pid"], created)

    def _fields(self, name: str) -> dict[str, Any]:
        data = self._place.read(_PINS + quote(name, safe="") + ".json")
        return json.loads(data) if data else {}

    def _ask(self, name: str, epoch: int | None) -> Pin:
        pin = Pin(name, Epoch(0), host_name(), os.getpid(), datetime.fromtimestamp(time.time(), UTC))
        wanted = None if epoch is None else int(epoch)
        fields = {"host": pin.host, "pid": pin.pid, "created": pin.created.isoformat(), "epoch": wanted}
        self._place.create(_PINS + quote(name, safe="") + ".json", json.dumps(fields).encode())
        return pin

    def _ack(self, name: str) -> Ack | None:
        data = self._place.read(_ACKS + quote(name, safe="") + ".json")
        if data is None:
            return None
        fields = json.loads(data)
        return Ack(Epoch(fields["epoch"]), fields["checkpoint"])

    def _answer(self, name: str, ack: Ack) -> None:
        fields = {"epoch": int(ack.epoch), "checkpoint": ack.checkpoint}
        self._place.write(_ACKS + quote(name, safe="") + ".json", json.dumps(fields).encode())

    def _ack_of(self, epoch: int) -> Ack | None:
        pinned = set(self._names(_PINS))
        for name in self._names(_ACKS):
            ack = self._ack(name) if name in pinned else None
            if ack is not None and ack.epoch == epoch:
                return ack
        return None
