"""KeptStatus: what a person wants to know of a kept table; from its files alone, in any process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwater.versioned.folder import TableFolder
from headwater.versioned.pins import PinInfo, pins_in


@dataclass(frozen=True, slots=True)
class PinStatus:
    """Somebody who needs an epoch. :ivar is_lost: the process is gone. :ivar lasting: the pin stays nevertheless."""

    owner: str
    epoch: int
    age_seconds: float
    process: str
    is_lost: bool
    id: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class KeptStatus:
    """One kept table.

    :ivar complete: its history is there as a whole: it can be read. :ivar base_epoch: the epoch of its runs.
    :ivar rows: of all runs; those that were replaced and not merged yet count as well. :ivar size: in bytes.
    """

    complete: bool
    base_epoch: int
    runs: int
    rows: int
    size: int
    pins: tuple[PinStatus, ...] = ()


def kept_status(root: str | Path, table: str) -> KeptStatus | None:
    """How the table is; ``None``: it is not kept there."""
    folder = TableFolder(root, table)
    newest = folder.newest()
    if newest.table is None:
        return None
    pins = tuple(pin_status(pin) for pin in pins_in(folder.path))
    return KeptStatus(newest.exact is not None, newest.epoch, len(newest.runs), newest.rows, newest.size, pins)


def pin_status(pin: PinInfo) -> PinStatus:
    """A pin, for people."""
    process = f"process {pin.pid} on {pin.host}"
    return PinStatus(pin.owner, pin.epoch, round(pin.age_seconds, 1), process, pin.is_lost, pin.id, pin.lasting)
