"""Stores beside a store: small ones of other owners, found from the store that they belong to.

``beside(location, "consumers", log, name)`` is a place under the store's own: a folder of an embedded store, a longer
prefix of an object store, a longer name in memory. Each is a whole store with a writer of its own, of at most
``MAX_BYTES`` in the embedded engine: a thousand of them fit into the addresses of a process.

A name is percent-encoded. In the embedded engine, one that is then too long for a file name is divided into several
folders: each but the last one ends with ``%``, which no encoded name does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from headwater.state.batch import WriteBatch
from headwater.state.errors import StoreNotFound
from headwater.state.location import open_reader, open_writer, split_location
from headwater.state.store import StateReader, StateStore
from headwater.stream import EpochClock

MAX_BYTES = 1 << 30
"""The most that a store beside another can hold, in the embedded engine. Addresses, not disk."""

LONGEST_SEGMENT = 255
"""Bytes of a file name in common file systems."""

_SETTLED_NS = 1_000_000_000
"""A file that was written less than this ago may change again within one tick of its file system's clock."""

Names = tuple[str, ...]


def beside(location: str, *parts: str) -> str:
    """The location of the store *parts* beside the one at *location*."""
    engine, rest = split_location(location)
    names = "/".join(map(_to_folders if engine == "embedded" else _to_segment, parts))
    if engine == "memory":
        return f"memory://{rest}/{names}"
    if engine == "slatedb":
        url = urlsplit(rest)
        return "slatedb+" + urlunsplit(url._replace(path=f"{url.path.rstrip('/')}/{names}"))
    return f"{rest}/{names}"


def open_beside_writer(location: str, *parts: str, takeover: bool = False) -> StateStore:
    """As ``open_writer``, for the store *parts* beside the one at *location*."""
    return open_small_writer(beside(location, *parts), takeover=takeover)


def open_small_writer(location: str, *, takeover: bool = False) -> StateStore:
    """As ``open_writer``, for a store at *location* of at most ``MAX_BYTES``."""
    engine, rest = split_location(location)
    if engine != "embedded":
        return open_writer(location, takeover=takeover)
    from headwater.state.engines.embedded import open_embedded_writer

    return open_embedded_writer(Path(rest), takeover=takeover, max_bytes=MAX_BYTES)


def open_beside_reader(location: str, *parts: str) -> StateReader:
    """As ``open_reader``, for the store *parts* beside the one at *location*."""
    return open_small_reader(beside(location, *parts))


def open_small_reader(location: str) -> StateReader:
    """As ``open_reader``, for a store at *location* of at most ``MAX_BYTES``."""
    engine, rest = split_location(location)
    if engine != "embedded":
        return open_reader(location)
    from headwater.state.engines.embedded import open_embedded_reader

    return open_embedded_reader(Path(rest), max_bytes=MAX_BYTES)


def remove_beside(location: str, *parts: str) -> None:
    """Remove the store *parts* beside the one at *location*, if it is there; nobody may have it open.

    One in an object store is emptied: its objects go with the garbage of the bucket.
    """
    place = beside(location, *parts)
    engine, rest = split_location(place)
    if engine == "embedded":
        shutil.rmtree(rest, ignore_errors=True)
        return
    try:
        open_beside_reader(location, *parts).close()
    except StoreNotFound:
        return
    with open_beside_writer(location, *parts, takeover=True) as store:
        batch = WriteBatch()
        batch.delete_range()
        store.seal(EpochClock(lambda: time.time_ns() // 1_000_000, store.committed_epoch()).next(), batch)


def stores_beside(location: str, first: str, depth: int) -> list[Names]:
    """The names of the stores at ``beside(location, first, …)`` with *depth* names more."""
    return sorted(marks_beside(location, first, depth))


def marks_beside(location: str, first: str, depth: int) -> dict[Names, Hashable]:
    """Those stores, each with a mark: while it stays the same, nothing was sealed there. ``None`` says nothing."""
    engine, rest = split_location(location)
    if engine == "memory":
        found = _memory_marks(rest, _to_segment(first))
    elif engine == "slatedb":
        found = _object_marks(rest, _to_segment(first), depth)
    else:
        found = _embedded_marks(f"{rest}/{_to_folders(first)}", depth)
    return {tuple(map(_from_segment, names)): mark for names, mark in found if len(names) == depth}


_NOTHING = "%"
"""Stands for an empty name: no other one becomes it."""
_MORE = "%"
"""The end of a folder whose name continues in the folder below."""


def _to_segment(name: str) -> str:
    """A name as one segment of a path that is never a way up or no way at all."""
    return quote(name, safe="").replace(".", "%2E") if set(name) == {"."} else quote(name, safe="") or _NOTHING


def _to_folders(name: str) -> str:
    """A name as a path: one folder, or several where its segment is too long for a file name."""
    segment = _to_segment(name)
    if len(segment) <= LONGEST_SEGMENT:
        return segment
    folders = [""]
    for char in name:
        encoded = _to_segment(char)
        if len(folders[-1]) + len(encoded) + len(_MORE) > LONGEST_SEGMENT:
            folders.append("")
        folders[-1] += encoded
    return f"{_MORE}/".join(folders)


def _is_part(segment: str) -> bool:
    """Whether the name continues in the folder below."""
    return segment.endswith(_MORE) and segment != _NOTHING


def _from_segment(segment: str) -> str:
    return "" if segment == _NOTHING else unquote(segment)


def _memory_marks(name: str, first: str) -> Iterator[tuple[Names, Hashable]]:
    from headwater.state.engines.memory import memory_names

    front = f"{name}/{first}/"
    for known in memory_names():
        if known.startswith(front):
            yield tuple(known.removeprefix(front).split("/")), None


def _object_marks(url: str, first: str, depth: int) -> Iterator[tuple[Names, Hashable]]:
    """A seal writes an object of the write-ahead log, under a name that was never there."""
    from headwater.state.engines.slate import Place

    logged: dict[Names, set[str]] = {}
    for name in Place.parse(url, create=False).names(f"{first}/"):
        parts = name.split("/")
        if len(parts) > depth + 2 and parts[depth + 1] in ("owner", "db"):
            found = logged.setdefault(tuple(parts[1 : depth + 1]), set())
            if parts[depth + 1 : depth + 3] == ["db", "wal"]:
                found.add(parts[-1])
    for names, objects in logged.items():
        yield names, frozenset(objects)


def _embedded_marks(root: str, depth: int) -> Iterator[tuple[Names, Hashable]]:
    """A seal writes into the data file; the time of that tells two apart when it is not of this very moment."""
    now = time.time_ns()
    for names, path in _folders(root, depth):
        try:
            found = os.stat(f"{path}/data.mdb")  # noqa: PTH116 - for a thousand stores at every seal
        except OSError:
            continue
        settled = now - found.st_mtime_ns > _SETTLED_NS
        yield names, (found.st_ino, found.st_size, found.st_mtime_ns) if settled else None


def _folders(root: str, depth: int) -> Iterator[tuple[Names, str]]:
    try:
        with os.scandir(root) as entries:
            names_here = [entry.name for entry in entries]
    except OSError:
        return
    for name in names_here:
        path = f"{root}/{name}"
        if _is_part(name):
            for names, folder in _folders(path, depth):
                yield (name.removesuffix(_MORE) + names[0], *names[1:]), folder
        elif depth == 1:
            yield (name,), path
        else:
            for names, folder in _folders(path, depth - 1):
                yield (name, *names), folder
