"""The state table: typed rows under ``table | vnode | key`` in a state store.

    table number u32 | vnode u16 | encoded key  →  encoded row

A table does no I/O of its own: it writes into the caller's batch and reads from the caller's snapshot, so the rows of
many tables are sealed in one epoch and read from one. Rows of older schema versions are brought up to date when they
are read, by the migrations that the table was opened with; :meth:`StateTable.rewrite` does so for good.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headwater.state.batch import MAX_KEY_BYTES, WriteBatch, prefix_end
from headwater.state.errors import InvalidKey, StoreCorrupt
from headwater.state.key_encoding import decode_key, encode_key
from headwater.state.row_encoding import decode_row, encode_row, schema_version_of
from headwater.state.store import Snapshot
from headwater.state.types import Field, TableSchema

_PLACE = struct.Struct(">IH")
MAX_VNODE = (1 << 15) - 1


class StateTable:
    """One table, as :class:`~headwater.state.catalog.Catalog` opens it."""

    def __init__(
        self,
        number: int,
        schema: TableSchema,
        versions: Mapping[int, tuple[Field, ...]],
        migrations: Mapping[int, Callable[[tuple[Any, ...]], tuple[Any, ...]]],
        announcement: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._number = number
        self._schema = schema
        self._versions = dict(versions)
        self._migrations = dict(migrations)
        self._announcement = announcement
        self._announced_in: weakref.ref[WriteBatch] | None = None

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def put(self, batch: WriteBatch, vnode: int, key: Sequence[Any], value: Sequence[Any]) -> None:
        """Insert or replace a row.

        :raises InvalidKey: the key does not fit, or is too long when encoded.
        :raises InvalidValue: the value does not fit.
        """
        place, row = self._whole_key(vnode, key), encode_row(self._schema.version, self._schema.value, value)
        self._announce(batch)
        batch.put(place, row)

    def _announce(self, batch: WriteBatch) -> None:
        if self._announcement is not None and (self._announced_in is None or self._announced_in() is not batch):
            self._announced_in = weakref.ref(batch)
            batch.put(*self._announcement)

    def delete(self, batch: WriteBatch, vnode: int, key: Sequence[Any]) -> None:
        """Forget a row."""
        batch.delete(self._whole_key(vnode, key))

    def delete_range(
        self, batch: WriteBatch, vnode: int, start: Sequence[Any] | None = None, end: Sequence[Any] | None = None
    ) -> None:
        """Forget the rows of *vnode* in ``[start, end)``; the bounds may be prefixes of a key."""
        batch.delete_range(*self._bounds(vnode, start, end))

    def get(self, view: Snapshot, vnode: int, key: Sequence[Any]) -> tuple[Any, ...] | None:
        """The values of a row, or ``None``."""
        data = view.get(self._whole_key(vnode, key))
        return None if data is None else self._values(data)

    def scan(
        self,
        view: Snapshot,
        vnode: int,
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Keys and values of *vnode* in ``[start, end)``, in key order; the bounds may be prefixes of a key."""
        low, high = self._bounds(vnode, start, end)
        for key, data in view.scan(low, high, reverse=reverse):
            yield decode_key(self._schema.key, key[_PLACE.size :]), self._values(data)

    def scan_prefix(
        self, view: Snapshot, vnode: int, prefix: Sequence[Any], *, reverse: bool = False
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Keys and values of *vnode* whose key begins with *prefix*."""
        for key, data in view.scan_prefix(self._key(vnode, prefix), reverse=reverse):
            yield decode_key(self._schema.key, key[_PLACE.size :]), self._values(data)

    def rewrite(self, view: Snapshot, batch: WriteBatch, limit: int | None = None) -> int:
        """Add to *batch* the rows that are stored in an older version, brought up to date; returns how many."""
        found = 0
        for key, data in view.scan_prefix(self._number.to_bytes(4, "big")):
            if limit is not None and found >= limit:
                break
            if schema_version_of(data) != self._schema.version:
                self._announce(batch)
                batch.put(key, encode_row(self._schema.version, self._schema.value, self._values(data)))
                found += 1
        return found

    def _values(self, stored: bytes) -> tuple[Any, ...]:
        data = bytes(stored)  # a mapped snapshot gives views
        version = schema_version_of(data)
        fields = self._versions.get(version)
        if fields is None or version > self._schema.version:
            raise StoreCorrupt(f"A row of state table {self._schema.name!r} has the unknown version {version}.")
        values = decode_row(fields, data)
        for step in range(version, self._schema.version):
            values = self._migrations[step](values)
        return values

    def _key(self, vnode: int, key: Sequence[Any]) -> bytes:
        if type(vnode) is not int or not 0 <= vnode <= MAX_VNODE:
            raise InvalidKey(f"Received vnode {vnode}; valid values are 0 to {MAX_VNODE}.")
        encoded = _PLACE.pack(self._number, vnode) + encode_key(self._schema.key, key)
        if len(encoded) > MAX_KEY_BYTES:
            raise InvalidKey(
                f"A key of state table {self._schema.name!r} has {len(encoded)} bytes when encoded; "
                f"at most {MAX_KEY_BYTES} can be held."
            )
        return encoded

    def _whole_key(self, vnode: int, key: Sequence[Any]) -> bytes:
        if len(key) != len(self._schema.key):
            raise InvalidKey(
                f"State table {self._schema.name!r} has {len(self._schema.key)} key fields; received {len(key)} values."
            )
        return self._key(vnode, key)

    def _bounds(self, vnode: int, start: Sequence[Any] | None, end: Sequence[Any] | None) -> tuple[bytes, bytes | None]:
        low = self._key(vnode, start or ())
        return low, prefix_end(self._key(vnode, ())) if end is None else self._key(vnode, end)
