"""The file store and its model under one roof: how tests open, reopen and damage each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.store.journal.memory_store import MemoryStore

from headwater.journal.entry import Durability, Limits
from headwater.journal.fs_store import FsStore
from headwater.journal.store import Store

NAMES = ("fs", "memory")


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

    def saved_bytes(self, name: str) -> bytes:
        """What a truncation or repair saved under *name*."""
        store = self.store
        if isinstance(store, MemoryStore):
            return store.saved[name]
        return Path(name).read_bytes()

    def close(self) -> None:
        self.store.close()
