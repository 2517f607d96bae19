"""Pins: epochs of kept tables that somebody reads: the base of a table does not go past the lowest of them.

A pin is a file in the folder of its table, with its owner, epoch, time, process and machine. Who makes one, and who
chooses up to where the next batch is folded, does so under one lock of the root folder: either the pin is there before
the epoch is chosen, and holds it back, or it comes after it, and is refused if its epoch is folded.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from headwater import failpoints
from headwater.system.files import make_private, open_private, replace_file
from headwater.system.process import ProcessName, boot_id, host_name
from headwater.versioned.errors import BaseGone, NotComplete

LOCK: Final = ".lock"
FOLDING: Final = "folding.json"
FOLDER: Final = "pins"

BEFORE_PIN = failpoints.register("versioned.before_pin")
AFTER_PIN = failpoints.register("versioned.after_pin")
BEFORE_RELEASE = failpoints.register("versioned.before_release")
AFTER_RELEASE = failpoints.register("versioned.after_release")
BEFORE_FOLDING = failpoints.register("versioned.before_folding")
AFTER_FOLDING = failpoints.register("versioned.after_folding")


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin, as everybody sees it.

    :ivar id: names its file. :ivar lasting: it outlives its process. :ivar is_lost: that is gone, of this machine.
    :ivar boot: … :ivar ticks: with the pid they name that process (:class:`headwater.system.process.ProcessName`); a
        pin of an earlier release has none of them.
    """

    id: str
    table: str
    owner: str
    epoch: int
    created_ms: int
    pid: int
    host: str
    lasting: bool = False
    boot: str = ""
    namespace: int = 0
    ticks: int = 0

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.created_ms / 1000)

    @property
    def is_lost(self) -> bool:
        if self.host != host_name():
            return False
        if self.boot:
            running = ProcessName(self.pid, self.boot, self.namespace, self.ticks).is_running()
            return self.boot != boot_id() if running is None else not running
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


class Pin:
    """A pin of this process; released by hand or at the end of a ``with`` block."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._path = path
        self.epoch = epoch

    def release(self) -> None:
        """The base may go on. A pin that is gone is no error."""
        failpoints.hit(BEFORE_RELEASE)
        self._path.unlink(missing_ok=True)
        failpoints.hit(AFTER_RELEASE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Nobody else makes a pin or chooses an epoch meanwhile."""
    make_private(root)
    with open_private(root / LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _state(root: Path) -> dict[str, Any]:
    """The epoch up to which tables are folded, or are about to be, and the tables whose history is being read."""
    try:
        told: dict[str, Any] = json.loads((root / FOLDING).read_text())
        return told
    except FileNotFoundError:
        return {"upto": 0, "reading": []}


def _put_state(root: Path, told: dict[str, Any]) -> None:
    failpoints.hit(BEFORE_FOLDING)
    _put(root / FOLDING, told)
    failpoints.hit(AFTER_FOLDING)


def _live_pins(folder: Path) -> list[PinInfo]:
    found: list[PinInfo] = []
    for pin in pins_in(folder):
        if pin.is_lost and not pin.lasting:
            (folder / FOLDER / f"{pin.id}.json").unlink(missing_ok=True)
        else:
            found.append(pin)
    return found


def choose_folding(root: Path, folders: Sequence[Path], upto: int) -> int:
    """Up to where tables are folded next: *upto*, or the lowest epoch that is pinned in *folders*.

    Pins whose process is gone are removed, but for those that outlive it.
    """
    with locked(root):
        chosen = min([upto, *(pin.epoch for folder in folders for pin in _live_pins(folder))])
        told = _state(root)
        if chosen > told["upto"]:
            _put_state(root, {**told, "upto": chosen})
    return chosen


def may_read(root: Path, folder: Path, table: str, *, wanted: bool) -> str | None:
    """Why the history of *table* cannot be read: it is pinned. Otherwise nobody pins it while it is *wanted*."""
    with locked(root):
        told = _state(root)
        held = _live_pins(folder) if wanted else []
        if held:
            return f"epoch {held[0].epoch} is pinned by {held[0].owner}"
        reading = sorted({*told["reading"], table} if wanted else {*told["reading"]} - {table})
        if reading != told["reading"]:
            _put_state(root, {**told, "reading": reading})
    return None


def put_pin(root: Path, folder: Path, table: str, owner: str, epoch: int, name: str | None = None) -> Pin:
    """A new pin; one of the same *name* is replaced.

    :param name: of a pin that outlives its process.
    :raises BaseGone: its epoch is folded, or about to be.
    """
    failpoints.hit(BEFORE_PIN)
    with locked(root):
        state = _state(root)
        gone = state["upto"]
        if table in state["reading"]:
            raise NotComplete(
                f"The history of {table} is being read.",
                {},
                next_step="Wait until headwater status shows that its history is read.",
            )
        if epoch < gone:
            raise BaseGone(
                f"Epoch {epoch} of {table} is folded, or about to be: the oldest that can be pinned is {gone}.",
                gone,
                next_step=f"Pin epoch {gone} or a later one.",
            )
        path = folder / FOLDER / f"{name or uuid.uuid4().hex}.json"
        make_private(path.parent)
        told = asdict(ProcessName.own()) | {
            "table": table,
            "owner": owner,
            "epoch": epoch,
            "created_ms": time.time_ns() // 1_000_000,
            "host": host_name(),
            "lasting": name is not None,
        }
        _put(path, told)
    failpoints.hit(AFTER_PIN)
    return Pin(path, epoch)


def pins_in(folder: Path) -> list[PinInfo]:
    """The pins of one table, the lowest epoch first."""
    found: list[PinInfo] = []
    for path in (folder / FOLDER).glob("*.json"):
        try:
            found.append(PinInfo(path.stem, **json.loads(path.read_text())))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda pin: (pin.epoch, pin.created_ms))


def all_pins(root: Path) -> list[PinInfo]:
    """The pins of all tables in *root*, by table and epoch."""
    found = [pin for folder in root.glob(f"*/{FOLDER}") for pin in pins_in(folder.parent)]
    return sorted(found, key=lambda pin: (pin.table, pin.epoch, pin.created_ms))


def release_pins(root: Path, wanted: Callable[[PinInfo], bool]) -> list[PinInfo]:
    """Release the *wanted* pins of all tables in *root*; whoever needs one may find its epoch gone."""
    released = []
    for folder in sorted(root.glob(f"*/{FOLDER}")):
        for pin in pins_in(folder.parent):
            if wanted(pin):
                Pin(folder / f"{pin.id}.json", pin.epoch).release()
                released.append(pin)
    return released


def _put(path: Path, told: dict[str, Any]) -> None:
    replace_file(path, json.dumps(told, sort_keys=True), durable=True)
