"""A writer keeps its log open; whatever happens to the log's name, no acknowledged entry goes where nobody finds it."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.store.journal.backends import Backend

from headwater.journal.entry import Entry, Head, new_id
from headwater.journal.errors import SegmentDeletedError, SegmentNotFoundError
from headwater.journal.fs_store import FsStore


@pytest.fixture
def log(fs: Backend) -> tuple[FsStore, tuple[str, str], Path]:
    """A store that holds the log of a segment with two entries open."""
    store = fs.store
    assert isinstance(store, FsStore)
    ids = (new_id(), new_id())
    store.create_segment(*ids, [Entry("first")])
    store.append(*ids, Entry("second"))
    return store, ids, Path(store.location(*ids))


Log = tuple[FsStore, tuple[str, str], Path]


def test_a_deletion_is_noticed_although_a_backup_holds_a_hard_link(fs: Backend, log: Log) -> None:
    store, ids, path = log
    os.link(path, path.with_suffix(".backup"))
    with fs.open() as other:
        other.delete_session(ids[0])
    with pytest.raises(SegmentDeletedError):
        store.append(*ids, Entry("late"))


def test_a_log_restored_from_a_copy_gets_the_next_entry(log: Log) -> None:
    store, ids, path = log
    copy, kept = path.with_suffix(".copy"), path.with_suffix(".kept")
    shutil.copy(path, copy)
    os.link(path, kept)
    copy.rename(path)
    head = store.append(*ids, Entry("third"))
    assert store.head(*ids) == head
    assert kept.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("above", [0, 1])
def test_a_log_whose_directory_was_moved_is_not_written_any_more(log: Log, above: int) -> None:
    store, ids, path = log
    moved = path.parents[above].with_name("moved")
    path.parents[above].rename(moved)
    before = next(moved.rglob("*.jsonl")).read_bytes()
    with pytest.raises(SegmentNotFoundError):
        store.append(*ids, Entry("lost"))
    with pytest.raises(SegmentNotFoundError):
        store.truncate(*ids, 0)
    assert next(moved.rglob("*.jsonl")).read_bytes() == before


def test_what_was_appended_while_the_store_closed_is_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsStore(tmp_path / "j", durability="flush", flush_interval=60)
    ids = (new_id(), new_id())
    store.create_segment(*ids)
    heads, synced, sync = list[Head](), list[int](), os.fdatasync

    def count(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        sync(fd)

    def late() -> None:
        writer = threading.Thread(target=lambda: heads.append(store.append(*ids, Entry("late"))))
        writer.start()
        writer.join()

    monkeypatch.setattr(os, "fdatasync", count)
    store.append(*ids, Entry("early"))
    assert store._flusher is not None
    join = store._flusher.join

    def join_and_append() -> None:
        join()
        late()

    monkeypatch.setattr(store._flusher, "join", join_and_append)
    store.close()
    assert heads[0].seq == 2
    assert synced[-1] == (tmp_path / "j" / ids[0] / f"{ids[1]}.jsonl").stat().st_size
