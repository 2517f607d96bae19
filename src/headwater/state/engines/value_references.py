"""Which keys point into which value objects: an object is garbage when its last pointer goes.

Kept in the database as ``m/large/<key>`` → name of the object, written in the batch that writes the key, and in the
writer's memory (some 200 bytes per large value), so that a put or a delete need not read what it replaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.state.engines.large_values import OBJECTS, pointer_of
from headwater.state.engines.object_snapshot import DATA, scan_cells
from headwater.state.engines.slate import Place, map_errors, run, slate

_LARGE = b"m/large/"
_INDEXED = b"m/indexed"
_OLD_COUNTS = b"m/objects/"


@dataclass(frozen=True, slots=True)
class Change:
    """What a batch changes: the keys that get, keep or lose a pointer, and the objects that end with it."""

    pointers: Mapping[bytes, str | None]
    ended: frozenset[str]

    def note(self, writes: Any) -> None:
        """Write it with the batch."""
        for key, name in self.pointers.items():
            if name is None:
                writes.delete(_LARGE + key)
            else:
                writes.put(_LARGE + key, name.encode())


class ValueReferences:
    """The pointers of a store."""

    def __init__(self, place: Place, database: Any) -> None:
        self._names: dict[bytes, str] = {}
        known: dict[str, str] = {}  # one string for the many pointers into one object
        with map_errors(place.location):
            indexed = run(database.get(_INDEXED))
        if indexed is None:
            _index(place, database)
        for keys, names in scan_cells(place, database, _LARGE):
            for key, stored in zip(keys, names, strict=True):
                name = stored.decode()
                self._names[key] = known.setdefault(name, name)
        self._counts = Counter(self._names.values())

    def objects(self) -> frozenset[str]:
        """The objects that somebody points into."""
        return frozenset(self._counts)

    def change(self, touched: Mapping[bytes, str | None]) -> Change:
        """What changes when the *touched* keys come to point into an object (or, ``None``, into none)."""
        pointers = {key: name for key, name in touched.items() if name is not None or key in self._names}
        counts: Counter[str] = Counter(filter(None, pointers.values()))
        counts.subtract(self._names[key] for key in pointers if key in self._names)
        ended = frozenset(name for name, more in counts.items() if self._counts[name] + more <= 0)
        return Change(pointers, ended)

    def apply(self, change: Change) -> None:
        """The *change* was written."""
        for key, name in change.pointers.items():
            old = self._names.pop(key, None)
            if old is not None:
                self._counts[old] -= 1
            if name is not None:
                self._names[key] = name
                self._counts[name] += 1
        for name in change.ended:
            del self._counts[name]


def _index(place: Place, database: Any) -> None:
    """Make the index of a store that was written without one: it counted the pointers of each object instead."""
    with map_errors(place.location):
        writes = slate.WriteBatch()
        writes.put(_INDEXED, b"1")
        if place.names(OBJECTS):
            for keys, _ in scan_cells(place, database, _OLD_COUNTS):
                for key in keys:
                    writes.delete(_OLD_COUNTS + key)
            for keys, cells in scan_cells(place, database, DATA):
                for key, cell in zip(keys, cells, strict=True):
                    pointer = pointer_of(cell)
                    if pointer is not None:
                        writes.put(_LARGE + key, pointer.name.encode())
        run(database.write(writes))
        run(database.flush())
