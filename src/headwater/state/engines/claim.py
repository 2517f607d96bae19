"""How a process becomes the writer of an embedded store.

Under LMDB's write lock: the lock file of the recorded generation is free (its owner is dead) or held (it lives:
refuse, or take over all the same). Then the next generation is recorded, with a lock file of its own that names the
new owner.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from headwater import failpoints
from headwater.state.engines.environment import Environment, Txn, child_environment, map_errors
from headwater.state.errors import StoreCorrupt, StoreOwned, StoreUnavailable
from headwater.state.ownership import OwnerLock, owner_from_bytes, owner_to_bytes
from headwater.state.store import Owner
from headwater.system.process import host_name, started

OPEN_BEFORE_COMMIT = failpoints.register("state.embedded.open_before_commit")

TAKEOVER_SECONDS = 30.0
"""How long a takeover waits for a writer that holds LMDB's write lock."""

OWNER = b"owner"

# run in a child: LMDB's wait for its write lock cannot be given up, but a child can be killed
_TAKE_THE_LOCK = "import lmdb, sys; lmdb.open(sys.argv[1], max_dbs=3, map_size=1 << 40).begin(write=True).abort()"


def owner_in(txn: Txn, environment: Environment) -> Owner | None:
    """The writer on record."""
    stored = txn.get(OWNER, db=environment.meta)
    return None if stored is None else owner_from_bytes(bytes(stored))


def refuse_if_owned(path: Path) -> None:
    """Look at the lock files only: an owner may hold LMDB's lock for long. :raises StoreOwned: a live writer has it."""
    generation = _newest_generation(path)
    lock = OwnerLock(_lock_path(path, generation))
    if generation and not _acquire_soon(lock):
        holder = lock.holder()
        if holder is not None:
            raise StoreOwned(str(path), holder.host, holder.pid, holder.started)
    lock.release()


def refuse_if_stuck(path: Path, seconds: float) -> None:
    """Before a takeover. :raises StoreUnavailable: the writer is inside a seal and does not move."""
    if not (path / "data.mdb").exists():
        return
    child = [sys.executable, "-c", _TAKE_THE_LOCK, str(path)]
    try:
        subprocess.run(child, env=child_environment(), stderr=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        holder = OwnerLock(_lock_path(path, _newest_generation(path))).holder()
        name = f"host {holder.host}, pid {holder.pid}" if holder else "another process"
        raise StoreUnavailable(
            f"The writer of {path} ({name}) is inside a seal and does not move.",
            next_step="Let it run, or kill it; then try again.",
        ) from error


def claim(environment: Environment, *, takeover: bool) -> tuple[Owner, OwnerLock]:
    """Become the owner.

    :raises StoreOwned: a live writer has the store, and *takeover* was not asked for.
    """
    path = environment.path
    with map_errors(path), environment.write() as txn:
        old = owner_in(txn, environment)
        if old is not None:
            last = OwnerLock(_lock_path(path, old.generation))
            if _acquire_soon(last):
                last.remove()
            elif not takeover:
                raise StoreOwned(str(path), old.host, old.pid, old.started)
        owner = Owner(old.generation + 1 if old else 1, host_name(), os.getpid(), started())
        mine = OwnerLock(_lock_path(path, owner.generation))
        if not mine.acquire(owner):
            raise StoreCorrupt(f"The lock file of generation {owner.generation} in {path} is held already.")
        try:
            _remove_stale_locks(path, owner.generation)
            txn.put(OWNER, owner_to_bytes(owner), db=environment.meta)
            failpoints.hit(OPEN_BEFORE_COMMIT)
        except BaseException:
            mine.remove()
            raise
    return owner, mine


def _lock_path(path: Path, generation: int) -> Path:
    return path / f"writer-{generation}.lock"


def _newest_generation(path: Path) -> int:
    return max((int(file.stem.removeprefix("writer-")) for file in path.glob("writer-*.lock")), default=0)


def _remove_stale_locks(path: Path, newest: int) -> None:
    for file in path.glob("writer-*.lock"):
        stale = OwnerLock(file)
        if file != _lock_path(path, newest) and stale.acquire():
            stale.remove()


def _acquire_soon(lock: OwnerLock) -> bool:
    """Another process that only looks whether the owner lives holds the lock for an instant."""
    for _ in range(5):
        if lock.acquire():
            return True
        time.sleep(0.004)
    return False
