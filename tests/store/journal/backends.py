"""The three stores under one roof: how tests open, reopen and damage each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.journal import Durability, FsStore, Limits, MemoryStore, SqliteStore, Store

NAMES = ("fs", "sqlite", "memory")


class Backend:
    """One kind of store in one place; `store` is the open one."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.store: Store = self.open()

    def open(self, **options: Any) -> Store:
        """A new store object on the same data (the memory store is its own data)."""
        options.setdefault("durability", Durability.NONE)
        if self.name == "fs":
            return FsStore(self.root / "journal", **options)
        if self.name == "sqlite":
            return SqliteStore(self.root / "journal.db", **options)
        options.pop("durability")
        options.pop("trace_bytes", None)
        return MemoryStore(**options)

    def reopen(self) -> Store:
        """Close and open again."""
        if self.name != "memory":
            self.store.close()
            self.store = self.open()
        return self.store

    def limited(self, limits: Limits, clock: Callable[[], int] | None = None) -> Store:
        """A store with other limits on new data."""
        self.root = self.root / "limited"
        options: dict[str, Any] = {"limits": limits}
        if clock is not None:
            options["clock"] = clock
        self.store.close()
        self.store = self.open(**options)
        return self.store

    def bytes_of(self, session: str, segment: str) -> bytes:
        """All bytes of a segment, as the store keeps them."""
        with self.store.source(session, segment) as source:
            return source.read(0, source.size())

    def put_bytes(self, session: str, segment: str, data: bytes) -> None:
        """Replace the bytes of an existing segment behind the store's back."""
        store = self.store
        if isinstance(store, FsStore):
            Path(store.location(session, segment)).write_bytes(data)
        elif isinstance(store, MemoryStore):
            store.data[session, segment][:] = data
        elif isinstance(store, SqliteStore):
            connection = store._connection()
            query = "SELECT id FROM segments WHERE session=? AND segment=?"
            number = connection.execute(query, (session, segment)).fetchone()[0]
            connection.execute("BEGIN")
            connection.execute("DELETE FROM lines WHERE segment_id=?", (number,))
            start = 0
            pieces = data.split(b"\n")
            rows = [piece + b"\n" for piece in pieces[:-1]] + [pieces[-1]] * bool(pieces[-1])
            for row in rows:
                connection.execute("INSERT INTO lines VALUES (?,?,?,NULL)", (number, start, row))
                start += len(row)
            connection.execute("COMMIT")

    def saved_bytes(self, name: str) -> bytes:
        """What a truncation or repair saved under *name*."""
        store = self.store
        if isinstance(store, MemoryStore):
            return store.saved[name]
        if isinstance(store, SqliteStore):
            query = "SELECT line FROM saved_lines WHERE saved_id=? ORDER BY start"
            rows = store._connection().execute(query, (int(name.rpartition("=")[2]),))
            return b"".join(row[0] for row in rows)
        return Path(name).read_bytes()

    def close(self) -> None:
        self.store.close()
