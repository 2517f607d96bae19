"""LMDB tables inside one transaction, as the engine and :mod:`headwater.state.versions` use them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from headwater.state.engines.environment import Txn


class LmdbCells:
    """One table inside one transaction."""

    __slots__ = ("_db", "_txn")

    def __init__(self, txn: Txn, db: Any) -> None:
        self._txn = txn
        self._db = db

    def get(self, key: bytes) -> Any:
        return self._txn.get(key, db=self._db)

    def put(self, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._db)

    def put_many(self, items: list[tuple[bytes, Any]]) -> None:
        with self._txn.cursor(db=self._db) as cursor:
            cursor.putmulti(items)

    def delete(self, key: bytes) -> None:
        self._txn.delete(key, db=self._db)

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.first() if start is None else cursor.set_range(start)
            while found and (end is None or cursor.key() < end):
                cursor.delete()
                found = bool(cursor.key())

    def items(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, Any]]:
        """Plain bytes; the bound is tested without a Python call per item."""
        with self._txn.cursor(db=self._db) as cursor:
            if reverse:
                if not _seek_last(cursor, end):
                    return
                walk = cursor.iterprev()
                yield from walk if start is None else takewhile((start,).__le__, walk)
            else:
                if not (cursor.first() if start is None else cursor.set_range(start)):
                    return
                walk = cursor.iternext()
                yield from walk if end is None else takewhile((end,).__gt__, walk)

    def keys(self, start: bytes | None, end: bytes | None) -> list[bytes]:
        with self._txn.cursor(db=self._db) as cursor:
            if not (cursor.first() if start is None else cursor.set_range(start)):
                return []
            walk = cursor.iternext(keys=True, values=False)
            return list(walk if end is None else takewhile(end.__gt__, walk))


class MappedCells(LmdbCells):
    """As :class:`LmdbCells` in a transaction that gives memoryviews: keys become bytes, values stay views."""

    __slots__ = ()

    def items(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, Any]]:
        with self._txn.cursor(db=self._db) as cursor:
            if reverse:
                found = _seek_last(cursor, end)
            else:
                found = cursor.first() if start is None else cursor.set_range(start)
            if not found:
                return
            for view, value in cursor.iterprev() if reverse else cursor.iternext():
                key = bytes(view)
                if (start is not None and key < start) if reverse else (end is not None and key >= end):
                    return
                yield key, value


def _seek_last(cursor: Any, end: bytes | None) -> bool:
    """Stand on the last key below *end*."""
    if end is not None and cursor.set_range(end):
        return bool(cursor.prev())
    return bool(cursor.last())
