"""A process that stopped while it held a lock hangs nobody: others are told after a while, and by whom."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.journal.damage import repair, salvage, verify
from headwater.journal.entry import Entry, new_id
from headwater.journal.errors import BusyError
from headwater.journal.fs_store import FsStore


@contextmanager
def held(path: Path) -> Iterator[None]:
    """What a stopped process does: `flock` that is never given back (on a description of its own)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_checks_of_a_locked_log_end_and_name_the_holder(tmp_path: Path) -> None:
    with FsStore(tmp_path, durability="none", lock_timeout=0.02) as store:
        ids = (new_id(), new_id())
        store.create_segment(*ids, [Entry("x")])
        with held(Path(store.location(*ids))):
            for call in (verify, salvage, repair):
                with pytest.raises(BusyError, match=str(os.getpid())):
                    call(store, *ids)
            assert len(store.read_all(*ids)) == 1


def test_creation_and_deletion_in_a_locked_session_end(tmp_path: Path) -> None:
    with FsStore(tmp_path, durability="none", lock_timeout=0.02) as store:
        ids = (new_id(), new_id())
        store.create_segment(*ids, [Entry("x")])
        with held(tmp_path / ids[0]):
            with pytest.raises(BusyError):
                store.create_segment(ids[0], new_id())
            with pytest.raises(BusyError):
                store.delete_session(ids[0])
        assert store.delete_session(ids[0])
