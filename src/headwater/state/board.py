"""Board: a few small records beside a store, which any process can read and write without owning the store.

========================  ==========================================================================================
``inbox/<id>``            a request to the owner of the store (:mod:`headwater.control.request`)
``claims/<id>``           who has the request of that id: its owner, or the one that withdraws it
``status``                how the process that runs a pipeline is; nothing depends on it
========================  ==========================================================================================

The board of a store is at ``beside(location, "board")``: files on one machine, objects in a bucket. It holds no truth:
what a process did is sealed in its store. A record has a *tag*, which changes with each write of it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from headwater import failpoints
from headwater.state.beside import beside
from headwater.state.engines.filesystem import NO_ROOM, full_disk
from headwater.state.errors import InvalidLocation, StoreBusy, StoreUnavailable
from headwater.state.location import local_folder, split_location
from headwater.system.files import make_private, make_root, open_private, sync

BOARD: Final = "board"

AFTER_CREATE = failpoints.register("board.after_create")
"""A record was created, durably."""

_LOCK_SECONDS: Final = 10.0
_ROOM: Final = 1 << 14
"""Records are padded to a multiple of this when they are written: then they can be overwritten without new room."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. :ivar data: ``None``: it has the tag that the reader knows."""

    tag: str
    data: bytes | None


class Board(Protocol):
    """Records by name: ``name`` or ``folder/name``, of letters, digits, ``-`` and ``_``. Any thread.

    Each method raises ``StateError`` when the files or the bucket cannot be used.

    :ivar poll_seconds: how often a process can look without a cost that counts.
    """

    @property
    def poll_seconds(self) -> float: ...

    def read(self, name: str, unless: str | None = None) -> Record | None:
        """The record; ``None``: there is none. :param unless: the tag of data that the caller has."""

    def write(self, name: str, data: bytes, if_tag: str | None = None) -> str | None:
        """Replace the record, whole; its new tag. In files it can be lost with the power of the machine.

        :param if_tag: only the record with this tag is replaced, else ``None`` is returned.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a record that does not exist yet, durably; ``False``: it exists."""

    def list(self, folder: str) -> dict[str, str]:
        """The tags of the records in *folder*, by name."""

    def remove(self, name: str) -> None:
        """Remove the record, if it exists."""


def open_board(location: str) -> Board:
    """The board of the store at *location*, which need not exist yet. Nothing is created before the first write."""
    place = beside(location, BOARD)
    root, folder = local_folder(location), local_folder(place)
    if root is not None and folder is not None:
        return FileBoard(root, folder)
    engine, rest = split_location(place)
    if engine == "memory":
        return MemoryBoard(rest)
    from headwater.state.engines.object_board import ObjectBoard

    return ObjectBoard(rest)


class MemoryBoard:
    """Shared by the handles of this process."""

    poll_seconds = 0.2

    def __init__(self, name: str) -> None:
        with _lock:
            self._records = _boards.setdefault(name, {})

    def read(self, name: str, unless: str | None = None) -> Record | None:
        found = self._records.get(name)
        return Record(found.tag, None) if found is not None and found.tag == unless else found

    def write(self, name: str, data: bytes, if_tag: str | None = None) -> str | None:
        global _writes
        with _lock:
            before = self._records.get(name)
            if if_tag is not None and (before is None or before.tag != if_tag):
                return None
            _writes += 1
            self._records[name] = Record(str(_writes), data)
            return str(_writes)

    def create(self, name: str, data: bytes) -> bool:
        with _lock:
            return name not in self._records and self.write(name, data) is not None

    def list(self, folder: str) -> dict[str, str]:
        with _lock:
            return {name: one.tag for name, one in self._records.items() if name.rpartition("/")[0] == folder}

    def remove(self, name: str) -> None:
        with _lock:
            self._records.pop(name, None)


_boards: dict[str, dict[str, Record]] = {}
_writes = 0
_lock = threading.RLock()


class FileBoard:
    """A file for each record: a line with its length and checksum, then the data.

    Writers have a lock while they rename. On a full disk a record is overwritten in place: a reader that meets half of
    it waits for the lock. The tag is the time of the write, which only goes up.

    :param root: the directory of the store, which must belong to the user. :param folder: of the board.
    """

    poll_seconds = 0.2

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder

    def read(self, name: str, unless: str | None = None) -> Record | None:
        for alone in (False, True):
            with self._errors(), self._alone() if alone else nullcontext():
                try:
                    with (self._folder / name).open("rb") as file:
                        tag = str(os.fstat(file.fileno()).st_mtime_ns)
                        if tag == unless:
                            return Record(tag, None)
                        data = _unpacked(file.read())
                except (FileNotFoundError, NotADirectoryError):
                    return None
            if data is not None:
                return Record(tag, data)
        return None  # its writer was killed while it overwrote it

    def write(self, name: str, data: bytes, if_tag: str | None = None) -> str | None:
        path = self._folder / name
        with self._errors(), self._alone():
            before = path.stat().st_mtime_ns if path.exists() else 0
            if if_tag is not None and if_tag != str(before):
                return None
            text, now = _packed(data, _ROOM), max(time.time_ns(), before + 1)
            try:
                self._draft(text, now).replace(path)
            except OSError:
                if not before:
                    raise
                with path.open("r+b", buffering=0) as file:
                    file.write(text)
                    file.truncate(len(text))
                    os.utime(file.fileno(), ns=(now, now))
            return str(path.stat().st_mtime_ns)

    def create(self, name: str, data: bytes) -> bool:
        path = self._folder / name
        with self._errors(), self._alone():
            if path.exists():
                return False
            make_private(path.parent)
            self._draft(_packed(data), time.time_ns(), durable=True).replace(path)
            for folder in (path.parent, self._folder, self._root):
                sync(folder)
        failpoints.hit(AFTER_CREATE)
        return True

    def list(self, folder: str) -> dict[str, str]:
        found: dict[str, str] = {}
        with self._errors():
            try:
                with os.scandir(self._folder / folder) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            found[f"{folder}/{entry.name}"] = str(entry.stat().st_mtime_ns)
            except (FileNotFoundError, NotADirectoryError):
                pass
        return found

    def remove(self, name: str) -> None:
        if (self._folder / name).exists():
            with self._errors(), self._alone():
                (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or thread writes. :raises StoreBusy: one is frozen while it does."""
        if not self._folder.is_dir():
            make_root(self._root)
            make_private(self._folder)
        with open_private(self._folder / ".lock", "ab") as file:
            end = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise StoreBusy(f"Another process holds the lock of {self._folder}.") from None
                    time.sleep(0.002)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that was forked meanwhile

    def _draft(self, text: bytes, now: int, *, durable: bool = False) -> Path:
        """*text* in a file of its own."""
        draft = self._folder / ".draft"
        try:
            with open_private(draft, "wb") as file:
                file.write(text)
                file.flush()
                os.utime(file.fileno(), ns=(now, now))
                if durable:
                    os.fsync(file.fileno())
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        return draft

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise full_disk(self._folder) from error
            if isinstance(error, PermissionError):
                raise InvalidLocation(f"{self._folder} cannot be used: {error.strerror}.") from error
            raise StoreUnavailable(f"{self._folder} cannot be used: {error.strerror}.") from error


def _packed(data: bytes, room: int = 1) -> bytes:
    text = b"%d %d\n%b" % (len(data), zlib.crc32(data), data)
    return text.ljust(-(-len(text) // room) * room, b"\n")


def _unpacked(text: bytes) -> bytes | None:
    """``None``: it is half written."""
    line, _, rest = text.partition(b"\n")
    try:
        length, checksum = map(int, line.split())
    except ValueError:
        return None
    data = rest[:length]
    return data if len(data) == length and zlib.crc32(data) == checksum else None
