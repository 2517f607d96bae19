"""The catalog: which state tables a store holds, under which number, in which versions.

One row per table under table number 0: ``00 00 00 00 | name`` holds JSON
``{"id": n, "key": […], "values": {"version": […]}}``. All versions of the value fields stay there, because old rows are
decoded by the fields of their own version. The row is written into the caller's batch, so a table comes to exist in the
same epoch as its first rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from headwater.state.batch import WriteBatch
from headwater.state.errors import SchemaMismatch, StoreCorrupt
from headwater.state.store import Snapshot
from headwater.state.table import StateTable
from headwater.state.types import Field, TableSchema, fields_from_json, fields_to_json

Migrate: TypeAlias = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Turns the values of one version into those of the next."""

_PREFIX = b"\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    key: tuple[Field, ...]
    values: Mapping[int, tuple[Field, ...]]

    @property
    def version(self) -> int:
        return max(self.values)

    def to_bytes(self) -> bytes:
        values = {str(version): fields_to_json(fields) for version, fields in sorted(self.values.items())}
        return json.dumps({"id": self.id, "key": fields_to_json(self.key), "values": values}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Entry:
        try:
            stored = json.loads(data)
            values = {int(version): fields_from_json(fields) for version, fields in stored["values"].items()}
            return cls(int(stored["id"]), fields_from_json(stored["key"]), values)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreCorrupt("A row of the table catalog cannot be read.") from error


_loaded: WeakKeyDictionary[Snapshot, dict[str, _Entry]] = WeakKeyDictionary()


class Catalog:
    """The state tables of one store."""

    def __init__(self, entries: dict[str, _Entry]) -> None:
        self._sealed = dict(entries)
        self._entries = entries

    @classmethod
    def load(cls, view: Snapshot) -> Catalog:
        """The catalog as *view* sees it; read once for each view. :raises StoreCorrupt: it cannot be read."""
        known = _loaded.get(view)
        if known is None:
            rows = view.scan_prefix(_PREFIX)
            known = {key[len(_PREFIX) :].decode(): _Entry.from_bytes(bytes(data)) for key, data in rows}
            _loaded[view] = known
        return cls(dict(known))

    def names(self) -> list[str]:
        return sorted(self._entries)

    def schema(self, name: str) -> TableSchema:
        """The newest schema of a table. :raises SchemaMismatch: no such table."""
        entry = self._entries.get(name)
        if entry is None:
            raise SchemaMismatch(f"There is no state table {name!r} in this store.")
        return TableSchema(name, entry.version, entry.key, entry.values[entry.version])

    def prefix(self, name: str) -> bytes:
        """The front of every key of a table. :raises SchemaMismatch: no such table."""
        self.schema(name)
        return self._entries[name].id.to_bytes(4, "big")

    def open(self, schema: TableSchema, migrations: Mapping[int, Migrate] | None = None) -> StateTable:
        """A table that exists; rows of older versions pass through *migrations* when they are read.

        :raises SchemaMismatch: no such table, other fields, a newer version than *schema*, or a missing migration.
        """
        self.schema(schema.name)
        return self._open(schema, migrations or {})

    def open_or_create(
        self, schema: TableSchema, batch: WriteBatch, migrations: Mapping[int, Migrate] | None = None
    ) -> StateTable:
        """As :meth:`open`; a new table, or a new version of one, exists from the first sealed batch that it writes to.

        Its catalog row goes into *batch*, and into every later batch that this table object writes to: a batch may
        never be sealed, and rows must not come without the row that names them.
        """
        entry = self._entries.get(schema.name)
        if entry is None:
            number = max((known.id for known in self._entries.values()), default=0) + 1
            entry = _Entry(number, schema.key, {schema.version: schema.value})
        elif entry.version < schema.version:
            entry = _Entry(entry.id, entry.key, {**entry.values, schema.version: schema.value})
        self._check(schema, entry, migrations or {})
        announcement = None
        if entry != self._sealed.get(schema.name):
            announcement = (_PREFIX + schema.name.encode(), entry.to_bytes())
            batch.put(*announcement)
        self._entries[schema.name] = entry
        return StateTable(entry.id, schema, entry.values, migrations or {}, announcement)

    def _open(self, schema: TableSchema, migrations: Mapping[int, Migrate]) -> StateTable:
        entry = self._entries[schema.name]
        self._check(schema, entry, migrations)
        return StateTable(entry.id, schema, entry.values, migrations)

    def _check(self, schema: TableSchema, entry: _Entry, migrations: Mapping[int, Migrate]) -> None:
        if entry.version > schema.version:
            raise SchemaMismatch(
                f"State table {schema.name!r} is stored in version {entry.version}; this release has {schema.version}.",
                next_step="Upgrade headwater.",
            )
        if entry.key != schema.key:
            raise SchemaMismatch(f"State table {schema.name!r} is stored under other key fields.")
        known = entry.values.get(schema.version)
        if known is not None and known != schema.value:
            raise SchemaMismatch(f"Version {schema.version} of state table {schema.name!r} has other stored fields.")
        for version in range(min(entry.values), schema.version):
            if version not in migrations:
                raise SchemaMismatch(f"State table {schema.name!r} needs a migration from version {version}.")
