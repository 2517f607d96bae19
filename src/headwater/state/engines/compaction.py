"""Offline compaction of an embedded store: a copy without its free pages takes the place of the file.

LMDB uses freed pages again but never gives them back to the disk. Nobody may have the store open meanwhile: every
process that does holds a shared lock on the first byte of LMDB's lock file, so an exclusive one proves that nobody
does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from headwater import failpoints
from headwater.state.engines.environment import is_open_here, map_errors
from headwater.state.errors import StoreBusy, StoreNotFound
from headwater.system.files import sync

COPIED = failpoints.register("state.embedded.compact_copied")
REPLACED = failpoints.register("state.embedded.compact_replaced")


@dataclass(frozen=True, slots=True)
class Compacted:
    """Bytes of the file before and after."""

    before: int
    after: int


def compact_embedded(path: Path) -> Compacted:
    """Compact the store in *path*.

    :raises StoreBusy: this or another process has it open.
    :raises StoreFull: no room for the copy; the store is as it was.
    """
    data, spare = path / "data.mdb", path / "compacting"
    if not data.exists():
        raise StoreNotFound(f"There is no state store in {path}.")
    lock = None if is_open_here(path) else os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if lock is None or not _alone(lock):
            raise StoreBusy(
                f"The state store in {path} is open in this or another process.",
                next_step="Stop its writer and readers, then compact again.",
            )
        shutil.rmtree(spare, ignore_errors=True)  # left by a compaction that was killed
        spare.mkdir(mode=0o700)
        before = data.stat().st_size
        with map_errors(path):
            environment: Any = lmdb.open(str(path), readonly=True, lock=False, max_dbs=3, map_size=1 << 40)
            try:
                environment.copy(str(spare), compact=True)
            finally:
                environment.close()
        copy = spare / "data.mdb"
        copy.chmod(0o600)
        sync(copy)
        failpoints.hit(COPIED)
        copy.replace(data)
        sync(path)
        failpoints.hit(REPLACED)
        shutil.rmtree(spare)
        return Compacted(before, data.stat().st_size)
    finally:
        if lock is not None:
            os.close(lock)


def _alone(lock: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError:
        return False
    return True
