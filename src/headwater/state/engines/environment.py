"""LMDB environments of this process: each directory is opened once, shared by its handles, never used after a fork.

LMDB forbids a second open of one directory in a process, and an environment inherited over ``fork`` must not be
touched by the child. So handles borrow the environment here and give it back; a forked child starts with an empty list.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import lmdb

from headwater.state.engines.filesystem import NO_ROOM, check_local, free_bytes, full_disk
from headwater.state.errors import (
    InvalidKey,
    InvalidLocation,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreUnavailable,
)
from headwater.system.files import check_private

Txn: TypeAlias = Any
"""A transaction of bytes or of memoryviews: which one is chosen when it begins."""

FORMAT = b"1"
_FORMAT_KEY = b"format"
_MAX_READERS = 2048
_READERS_BYTES = _MAX_READERS * 64
_NEARLY_FULL = 64 << 20
_SNAPSHOT_SECONDS = 1.0

_opened: dict[tuple[int, int], Environment] = {}
_inherited: list[Environment] = []
_lock = threading.Lock()


@contextmanager
def map_errors(path: Path) -> Iterator[None]:
    """LMDB's errors in our words."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFull(
            f"The state store at {path} has reached its limit.",
            next_step="Open it with open_embedded_writer(path, max_bytes=…).",
        ) from error
    except lmdb.BadValsizeError as error:
        raise InvalidKey("A key or value has a size that the embedded engine cannot hold.") from error
    except (
        lmdb.InvalidError,
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.VersionMismatchError,
        lmdb.PanicError,
        lmdb.IncompatibleError,
    ) as error:
        raise StoreCorrupt(
            f"The state store at {path} is damaged or not a state store: {error}.",
            next_step="Restore the directory from a copy.",
        ) from error
    except lmdb.DiskError as error:
        raise full_disk(path) from error
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise full_disk(path) from error
    except lmdb.ReadersFullError as error:
        raise StoreUnavailable(f"More than {_MAX_READERS} snapshots are open on {path}; close some.") from error
    except lmdb.Error as error:
        if _says(error, errno.EACCES, errno.EPERM, errno.EROFS):
            raise InvalidLocation(f"{path} cannot be opened: {error}.") from error
        if _says(error, errno.ENOMEM):
            raise InvalidLocation(
                f"{path} cannot be mapped into memory: the address space of this process is limited.",
                next_step="Raise ulimit -v.",
            ) from error
        if _says(error, *NO_ROOM) or (_says(error, errno.EIO) and _no_room(path)):
            raise full_disk(path) from error
        raise StoreUnavailable(f"The state store at {path} did not answer: {error}.") from error


def _says(error: lmdb.Error, *numbers: int) -> bool:
    return any(os.strerror(number) in str(error) for number in numbers)


def _no_room(path: Path) -> bool:
    """LMDB reports a write that came out short as an I/O error: was there no room?"""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    near_limit = limit != resource.RLIM_INFINITY and (path / "data.mdb").stat().st_size > limit - _NEARLY_FULL
    return near_limit or free_bytes(path) < _NEARLY_FULL


class Environment:
    """One opened directory: the LMDB environment and its three tables.

    Readers open it read-only, because opening a table of a writable environment waits for LMDB's write lock, which a
    writer holds while it seals. The first pin makes it writable, when no snapshot of this process is open.
    """

    def __init__(self, path: Path, *, create: bool, max_bytes: int) -> None:
        self.path = path
        self._borrowers = 1
        self._max_bytes = max_bytes
        self._readers = 0
        self._readers_lock = threading.Lock()
        data = path / "data.mdb"
        if not create and (not data.exists() or data.stat().st_size == 0):
            raise StoreNotFound(f"There is no state store in {path}.")
        self._open(create=create, readonly=not create)

    def _open(self, *, create: bool, readonly: bool) -> None:
        data = self.path / "data.mdb"
        if not readonly:
            _allocate_locks(self.path / "lock.mdb")
        while True:
            found = data.stat().st_ino if data.exists() else None
            with map_errors(self.path):
                self._env: Any = lmdb.open(
                    str(self.path),
                    map_size=self._max_bytes,
                    max_dbs=3,
                    max_readers=_MAX_READERS,
                    mode=0o600,
                    readonly=readonly,
                    create=create,
                )
            if found in (None, data.stat().st_ino):
                break
            self._env.close()  # a compaction put another file there while we opened
        self._readonly = readonly
        try:
            self._open_tables(create)
        except BaseException:
            self._env.close()
            raise

    def make_writable(self) -> None:
        """:raises StoreUnavailable: a snapshot of this process stays open. :raises InvalidLocation: no permission."""
        end = time.monotonic() + _SNAPSHOT_SECONDS
        while self._readonly and self._readers and time.monotonic() < end:
            time.sleep(0.005)  # most of those of other threads end soon
        with self._readers_lock:
            if not self._readonly:
                return
            if self._readers:
                raise StoreUnavailable(
                    f"{self.path} is open for reading here and a snapshot is open.",
                    next_step="Pin, or open the writer, before the first snapshot, or close the snapshots.",
                )
            if not os.access(self.path / "data.mdb", os.W_OK):
                raise InvalidLocation(f"{self.path} cannot be written: permission denied.")
            self._env.close()
            self._open(create=False, readonly=False)

    def _open_tables(self, create: bool) -> None:
        with map_errors(self.path):
            self._check_length()
            try:
                self.meta = self._env.open_db(b"meta", create=create)
                self.main = self._env.open_db(b"main", create=create)
                self.undo = self._env.open_db(b"undo", create=create)
            except (lmdb.NotFoundError, lmdb.ReadonlyError) as error:
                raise StoreNotFound(f"There is no state store in {self.path}.") from error
            with self._env.begin() as txn:
                found = txn.get(_FORMAT_KEY, db=self.meta)
            if found is None and create:
                with self._env.begin(write=True) as txn:
                    txn.put(_FORMAT_KEY, FORMAT, db=self.meta)
            elif found is None:
                raise StoreNotFound(f"The state store in {self.path} is not complete yet.")
            elif found != FORMAT:
                raise StoreCorrupt(
                    f"The state store in {self.path} has format {found.decode(errors='replace')}; "
                    f"this release reads format {FORMAT.decode()}.",
                    next_step="Upgrade headwater.",
                )

    def _check_length(self) -> None:
        """A file cut short would end this process by SIGBUS at the first missing page: let a child find out."""
        page, last = self.page_geometry()
        missing = (last + 1) * page - (self.path / "data.mdb").stat().st_size
        if last <= 1 or missing <= 0:
            return
        child = [sys.executable, str(Path(__file__).with_name("walk.py")), str(self.path)]
        if subprocess.run(child, env=child_environment(), stderr=subprocess.DEVNULL, check=False).returncode:
            raise StoreCorrupt(
                f"The state store in {self.path} is cut short by {missing} bytes.",
                next_step="Restore the directory from a copy.",
            )
        self.cover_pages()

    def cover_pages(self) -> None:
        """Make the file as long as its last page number says; what was committed stays so if that fails.

        LMDB does not write free pages at the end, and a file that looks cut would have to be walked at every open.
        """
        try:
            page, last = self.page_geometry()
            data = self.path / "data.mdb"
            if data.stat().st_size < (last + 1) * page and os.access(data, os.W_OK):
                fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.posix_fallocate(fd, (last + 1) * page - 1, 1)  # lengthens, never overwrites
                finally:
                    os.close(fd)
        except OSError:
            pass  # the next open walks

    def page_geometry(self) -> tuple[int, int]:
        """Bytes of a page, and the number of the last page in use."""
        return self._env.stat()["psize"], self._env.info()["last_pgno"]

    def begin_read(self, *, mapped: bool = False) -> Txn:
        """A read transaction; end it with :meth:`end_read`."""
        with map_errors(self.path), self._readers_lock:
            try:
                txn = self._env.begin(buffers=mapped)
            except lmdb.MapResizedError:
                # a writer of another process chose a larger map; ours can only follow while nobody reads here
                if self._readers:
                    raise StoreUnavailable(f"{self.path} grew; close the open snapshots and try again.") from None
                self._env.set_mapsize(0)
                txn = self._env.begin(buffers=mapped)
            self._readers += 1
            return txn

    def end_read(self, txn: Txn) -> None:
        txn.abort()
        with self._readers_lock:
            self._readers -= 1

    @contextmanager
    def write(self) -> Iterator[Txn]:
        """A write transaction: committed at the end of the block, aborted by any error in it."""
        self.make_writable()
        txn = self._env.begin(write=True)
        try:
            yield txn
            txn.commit()
        except BaseException:
            txn.abort()
            raise

    def forget_dead_readers(self) -> None:
        with map_errors(self.path):
            self._env.reader_check()

    def borrow(self) -> Environment:
        with _lock:
            self._borrowers += 1
        return self

    def give_back(self) -> None:
        """One borrower less; the last one closes the environment."""
        with _lock:
            if self not in _opened.values():
                return  # a forked child: the environment is the parent's
            self._borrowers -= 1
            if not self._borrowers:
                for name in [name for name, known in _opened.items() if known is self]:
                    del _opened[name]
                self._env.close()


def _allocate_locks(path: Path) -> None:
    """Take the room of LMDB's table of readers, before this process opens it: it is mapped into memory.

    A process that uses a page of it for the first time while the disk is full would end by SIGBUS.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_blocks * 512 < _READERS_BYTES:
                os.posix_fallocate(fd, 0, _READERS_BYTES)  # never overwrites
        finally:
            os.close(fd)
    except OSError:
        pass  # the next open tries again


def borrow(path: Path, *, create: bool, max_bytes: int) -> Environment:
    """The environment of *path*, opened now or shared with the handles that this process has already."""
    if not create:
        _check_directory(path)
    check_local(path)
    check_private(path)
    with _lock:
        known = _opened.get(_name(path))
        if known is not None:
            known._borrowers += 1
        else:
            known = _opened[_name(path)] = Environment(path.resolve(), create=create, max_bytes=max_bytes)
    if create:
        try:
            known.make_writable()
        except BaseException:
            known.give_back()
            raise
    return known


def _check_directory(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise StoreNotFound(f"There is no state store in {path}.") from error
    except NotADirectoryError as error:
        raise InvalidLocation(f"{path} is not a directory.") from error
    except (OSError, ValueError) as error:
        raise InvalidLocation(f"{path} cannot be opened: {error}.") from error
    if not stat.S_ISDIR(mode):
        raise InvalidLocation(f"{path} is not a directory.")


def child_environment() -> dict[str, str]:
    """Variables for a child that must import what this process can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def is_open_here(path: Path) -> bool:
    """Whether a handle of this process has *path* open."""
    with _lock:
        return _name(path) in _opened


def _name(path: Path) -> tuple[int, int]:
    """A directory is itself whatever path leads to it, and another one when it was made anew."""
    try:
        found = path.stat()
    except OSError as error:
        raise StoreNotFound(f"There is no state store in {path}.") from error
    return found.st_dev, found.st_ino


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_opened.values())  # kept alive: closing them here would hurt the parent
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


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
