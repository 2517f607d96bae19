"""What a sink must have after any batches, told by plain Python: one small model for each mode.

A model is given what the sink is given: changes ``(op, values, names of unavailable columns)``, each a commit of its
own as :func:`tests.store.sinks.file_sinks.log_rows` makes them, and rows of history with their part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.store.sinks.file_sinks import OLD

from headwater.sinks.sink import Mode
from headwater.stream.op import REREAD, Op

Row = dict[str, Any]
Change = tuple[Any, ...]
HISTORY_VERSION, HISTORY_US = 7, 1_000_000
"""Of the parts that :func:`tests.store.sinks.file_sinks.history_part` makes."""

TRUNCATED = "some time"
"""A version that a TRUNCATE ended: the log tells only about when that was."""


@dataclass(frozen=True)
class Part:
    """What a model needs to know of a part of history."""

    ranges: Sequence[tuple[int | None, int | None]] = ((None, None),)
    replaces: bool = False
    columns: tuple[str, ...] | None = None

    def has(self, key: tuple[Any, ...]) -> bool:
        return any((start is None or key[0] >= start) and (end is None or key[0] < end) for start, end in self.ranges)


@dataclass
class Model(ABC):
    """A table as it must be. :ivar key: names of its key columns."""

    key: tuple[str, ...] = ("id",)

    @abstractmethod
    def changes(self, epoch: int, changes: Sequence[Change], truncated: int | None = None) -> None:
        """:param truncated: how many of *changes* came before a TRUNCATE."""

    @abstractmethod
    def history(self, rows: Sequence[Row], part: Part) -> None: ...

    @abstractmethod
    def rows(self) -> list[Row]: ...

    def copy_column(self, old: str, new: str) -> None:
        """The column was renamed at the source, and the sink keeps old rows right."""
        for row in self.rows():
            row[new] = row.get(old)

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


@dataclass
class MirrorModel(Model):
    """The rows as they are now."""

    now: dict[tuple[Any, ...], Row] = field(default_factory=dict)

    def changes(self, epoch: int, changes: Sequence[Change], truncated: int | None = None) -> None:
        if truncated is not None:
            self.now.clear()
        for place, change in enumerate(changes):
            if place >= (truncated or 0):
                _apply(self, self.now, change, changes[place + 1] if place + 1 < len(changes) else None)

    def history(self, rows: Sequence[Row], part: Part) -> None:
        if part.replaces:
            for key in [key for key in self.now if part.has(key)]:
                del self.now[key]
        for row in rows:
            key = self.key_of(row)
            if part.columns is None:
                self.now[key] = dict(row)
            elif key in self.now:
                self.now[key] |= {name: row[name] for name in part.columns}

    def rows(self) -> list[Row]:
        return list(self.now.values())


@dataclass
class ChangesModel(Model):
    """Every change. :ivar own: names of the columns of the table."""

    own: tuple[str, ...] = ()
    told: list[Row] = field(default_factory=list)

    def changes(self, epoch: int, changes: Sequence[Change], truncated: int | None = None) -> None:
        for place, (op, values, *unavailable) in enumerate(changes):
            self._tell(values, Op(op).change_type, epoch * 100 + place, epoch * 1_000_000, *unavailable)

    def history(self, rows: Sequence[Row], part: Part) -> None:
        for row in rows:
            if part.columns is None:
                kind = REREAD if part.replaces else Op.INSERT.change_type
                self._tell(row, kind, HISTORY_VERSION, HISTORY_US)
                continue
            told = {*self.key, *part.columns}
            others = ",".join(name for name in self.own if name not in told)
            only = {name: value for name, value in row.items() if name in told}
            self._tell(only, REREAD, HISTORY_VERSION, HISTORY_US, others or None)

    def rows(self) -> list[Row]:
        return self.told

    def _tell(self, row: Row, change_type: str, version: int, time_us: int, unavailable: str | None = None) -> None:
        added = {
            "_change_type": change_type,
            "_commit_version": version,
            "_commit_timestamp": moment(time_us),
            "_unavailable": unavailable,
        }
        self.told.append({**row, **added})


@dataclass
class HistoryModel(Model):
    """Every version. Those that are current are the rows of a mirror."""

    current: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    closed: list[Row] = field(default_factory=list)

    def changes(self, epoch: int, changes: Sequence[Change], truncated: int | None = None) -> None:
        at = moment(epoch * 1_000_000)
        if truncated is not None:
            for row in self.current.values():
                self.closed.append({**row, "_valid_to": TRUNCATED, "_is_current": False})
            self.current.clear()
        for place, change in enumerate(changes):
            if place < (truncated or 0):
                continue
            plain = {key: dict(row) for key, row in self.current.items()}
            _apply(self, plain, change, changes[place + 1] if place + 1 < len(changes) else None)
            key = self.key_of(change[1])
            if change[0] == OLD and key in plain:
                continue
            self._become(key, plain.get(key), at, epoch * 100 + place)

    def history(self, rows: Sequence[Row], part: Part) -> None:
        at = moment(HISTORY_US)
        if part.replaces:
            told = {self.key_of(row) for row in rows}
            for key in [key for key in self.current if part.has(key) and key not in told]:
                self._become(key, None, at, HISTORY_VERSION)
        for row in rows:
            key = self.key_of(row)
            was = self.current.get(key)
            if part.columns is not None:
                if was is None:
                    continue
                row = {**was, **{name: row[name] for name in part.columns}}
            if was is None or any(was.get(name) != row.get(name) for name in row if not name.startswith("_")):
                self._become(key, dict(row), at, HISTORY_VERSION)

    def rows(self) -> list[Row]:
        return [*self.closed, *self.current.values()]

    def _become(self, key: tuple[Any, ...], row: Row | None, at: datetime, version: int) -> None:
        was = self.current.pop(key, None)
        begins = at if was is None else max(at, was["_valid_from"])
        if was is not None:
            self.closed.append({**was, "_valid_to": begins, "_is_current": False})
        if row is not None:
            added = {"_valid_from": begins, "_valid_to": None, "_is_current": True, "_commit_version": version}
            self.current[key] = {**row, **added}


def model_of(mode: Mode, key: tuple[str, ...], own: tuple[str, ...]) -> Model:
    """An empty table."""
    if mode is Mode.CHANGES:
        return ChangesModel(key, own)
    return MirrorModel(key) if mode is Mode.MIRROR else HistoryModel(key)


def moment(time_us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


def _apply(model: Model, now: dict[tuple[Any, ...], Row], change: Change, following: Change | None) -> None:
    """One change to the rows of a mirror; of an update pair the old half stays until the new one comes."""
    op, values, *unavailable = change
    key = model.key_of(values)
    if Op(op).adds:
        kept = [name for name in (unavailable[0] or "").split(",") if name] if unavailable else []
        was = now.get(key, {})
        now[key] = {**values, **{name: was.get(name) for name in kept}}
    elif op != OLD or following is None or model.key_of(following[1]) != key:
        now.pop(key, None)
