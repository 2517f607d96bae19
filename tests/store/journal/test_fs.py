"""What only the file store can show: names, modes, faults of single system calls, durability levels, golden files."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.store.journal.backends import Backend

from headwater.errors import ClosedError, InputError
from headwater.journal.damage import verify
from headwater.journal.entry import Entry, new_id
from headwater.journal.errors import (
    AccessDeniedError,
    BusyError,
    NoRoomError,
    NotARegularFileError,
    SegmentNotFoundError,
    StoreIoError,
    SyncFailedError,
)
from headwater.journal.fs_store import FsStore
from headwater.journal.run_state import replay

FIXTURES = Path(__file__).parents[2] / "fixtures" / "journal"
Ids = tuple[str, str]


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def make(store: FsStore) -> tuple[Ids, Path]:
    ids = new_id(), new_id()
    store.create_segment(*ids)
    return ids, Path(store.location(*ids))


@pytest.fixture
def store(fs: Backend) -> FsStore:
    assert isinstance(fs.store, FsStore)
    return fs.store


def test_listing_ignores_everything_that_is_not_exactly_a_log(store: FsStore) -> None:
    """Scenarios d, cc: flat files, other names, traces, side files, links, directories, odd spellings."""
    (session, segment), log = make(store)
    other = new_id()
    root, home = store.root, log.parent
    (root / f"{new_id()}.jsonl").write_text("flat")
    (root / "notes").mkdir()
    (root / new_id().upper()).mkdir()
    (root / new_id()).mkdir()
    (root / new_id()).symlink_to(home)
    for name in (
        f"{other}.trace.jsonl",
        f"{other}.jsonl.jsonl",
        f"{other.upper()}.jsonl",
        f"{other}.removed-1.abc.saved",
        "x.jsonl",
        f".{other}.1-a.tmp",
    ):
        (home / name).write_text("x")
    (home / f"{new_id()}.jsonl").mkdir()
    (home / f"{new_id()}.jsonl").symlink_to(log)
    assert store.list_sessions() == [session]
    assert store.list_segments(session) == [segment]


def test_a_link_or_directory_in_place_of_a_log_is_refused(store: FsStore) -> None:
    """Scenario x."""
    (session, _), log = make(store)
    link, directory, pipe = new_id(), new_id(), new_id()
    log.with_name(f"{link}.jsonl").symlink_to(log)
    log.with_name(f"{directory}.jsonl").mkdir()
    os.mkfifo(log.with_name(f"{pipe}.jsonl"))
    for name in (link, directory, pipe):
        for call in (store.exists, store.read_all, store.head):
            with pytest.raises(NotARegularFileError) as caught:
                call(session, name)
            assert not isinstance(caught.value, SegmentNotFoundError)
        with pytest.raises(NotARegularFileError):
            store.append(session, name, Entry("x"))


def test_files_and_directories_are_private(store: FsStore) -> None:
    before = os.umask(0)
    try:
        ids, log = make(store)
        store.append(*ids, Entry("a"))
        store.append(*ids, Entry("b"))
        store.truncate(*ids, 1)
        store.append_trace(*ids, {"kind": "x"})
        store.own(ids[0]).release()
        other, _ = make(store)
        store.delete_session(other[0])
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in store.root.rglob("*")}
    assert modes[log] == 0o600
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to change its user")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_permission_denied_is_not_not_found(store: FsStore) -> None:
    """Scenario x: as a user who may not look, and in a directory that may not be written."""
    ids, log = make(store)
    store.append(*ids, Entry("x"))
    store.close()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.seteuid(65534)
            theirs = FsStore(store.root)
            for call in (theirs.exists, theirs.read_all, theirs.head):
                with pytest.raises(AccessDeniedError) as caught:
                    call(*ids)
                assert isinstance(caught.value, InputError)
            with pytest.raises(AccessDeniedError):
                theirs.truncate(*ids, 0)
            with pytest.raises(AccessDeniedError):
                theirs.append(*ids, Entry("x"))
            with pytest.raises(AccessDeniedError):
                theirs.list_sessions()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert log.exists()


def test_a_short_write_is_completed(store: FsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario k."""
    ids, _ = make(store)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 3)]))
    store.append(*ids, Entry("x", {"text": "y" * 1000}))
    monkeypatch.undo()
    assert store.read_all(*ids)[0].fields["text"] == "y" * 1000


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, NoRoomError), (errno.EIO, StoreIoError)])
def test_a_failed_write_puts_the_old_end_back(
    store: FsStore, monkeypatch: pytest.MonkeyPatch, number: int, error: type[StoreIoError]
) -> None:
    """Scenario k: also when part of the entry was written before."""
    ids, log = make(store)
    store.append(*ids, Entry("good"))
    before = log.read_bytes()
    real, calls = os.write, iter(range(9))

    def failing(fd: int, data: bytes) -> int:
        if next(calls):
            raise OSError(number, os.strerror(number))
        return real(fd, data[:10])

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(error) as caught:
        store.append(*ids, Entry("lost"))
    assert caught.value.errno == number
    assert log.read_bytes() == before
    monkeypatch.undo()
    assert store.append(*ids, Entry("next")).seq == 2


def test_a_failed_rollback_is_told_and_repaired_by_the_next_append(
    store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario k: rollback failure reported."""
    ids, log = make(store)
    store.append(*ids, Entry("good"))
    before = log.read_bytes()
    real, calls = os.write, iter(range(9))

    def failing(fd: int, data: bytes) -> int:
        if next(calls):
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data[:10])

    def refused(fd: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "write", failing)
    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(StoreIoError, match="undo a failed write"):
        store.append(*ids, Entry("lost"))
    monkeypatch.undo()
    assert len(log.read_bytes()) == len(before) + 10
    assert [e.kind for e in store.read_all(*ids)] == ["good"]
    assert store.append(*ids, Entry("next")).seq == 2
    assert verify(store, *ids).ok


def test_an_interrupt_during_the_write_leaves_no_half_entry(store: FsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, log = make(store)
    store.append(*ids, Entry("good"))
    before = log.read_bytes()
    real = os.write

    def interrupted(fd: int, data: bytes) -> int:
        real(fd, data[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.append(*ids, Entry("lost"))
    monkeypatch.undo()
    assert log.read_bytes() == before
    assert store.append(*ids, Entry("next")).seq == 2


def test_fsync_syncs_each_append_before_it_returns_and_none_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def noting(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", noting)
    for level, expected in (("fsync", 3), ("none", 0)):
        with FsStore(tmp_path / level, durability=level) as store:
            ids, _ = make(store)
            synced.clear()
            for _ in range(3):
                store.append(*ids, Entry("x"))
            assert len(synced) == expected


def test_flush_syncs_within_its_interval_and_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    count = 0
    real = os.fdatasync

    def counting(fd: int) -> None:
        nonlocal count
        count += 1
        real(fd)
        synced.set()

    monkeypatch.setattr(os, "fdatasync", counting)
    with FsStore(tmp_path, durability="flush", flush_interval=0.02) as store:
        ids, _ = make(store)
        for _ in range(50):
            store.append(*ids, Entry("x"))
        assert synced.wait(5)
        assert count < 50, "many appends share one sync"
    with FsStore(tmp_path, durability="flush", flush_interval=3600) as store:
        store.append(*ids, Entry("x"))
        before = count
        store._stop.set()
    assert count == before + 1


def test_creation_is_durable_at_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    real = os.fsync

    def noting(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    monkeypatch.setattr(os, "fsync", noting)
    with FsStore(tmp_path / "a", durability="none") as store:
        make(store)
    assert synced.count(False) == 1
    assert synced[-1], "the directory after the file"
    assert synced.index(False) < len(synced) - 1


@pytest.mark.parametrize("level", ["fsync", "flush"])
def test_a_failed_sync_is_fatal_and_never_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    calls = 0

    def broken(fd: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO, "broken")

    with FsStore(tmp_path, durability=level, flush_interval=0.005) as store:
        ids, _ = make(store)
        monkeypatch.setattr(os, "fdatasync", broken)

        def write() -> None:
            for _ in range(1000):
                store.append(*ids, Entry("x"))
                time.sleep(0.002)

        with pytest.raises(SyncFailedError) as caught:
            write()
        assert isinstance(caught.value, ClosedError)
        monkeypatch.undo()
        for _ in range(3):
            with pytest.raises(SyncFailedError):
                store.append(*ids, Entry("x"))
        assert calls == 1
        other, _ = make(store)
        store.append(*other, Entry("x"))
        with pytest.raises(SyncFailedError):
            store.append(*ids, Entry("x"))
    with FsStore(tmp_path, durability=level) as store:
        store.append(*ids, Entry("after reopening"))


def test_a_failed_sync_that_nobody_heard_of_is_told_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsStore(tmp_path, durability="flush", flush_interval=3600)
    ids, _ = make(store)
    store.append(*ids, Entry("x"))

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fdatasync", broken)
    store._stop.set()
    with pytest.raises(SyncFailedError):
        store.close()


def test_a_store_that_is_not_closed_syncs_when_its_process_ends(tmp_path: Path) -> None:
    ids = new_id(), new_id()
    program = f"""
import os
from headwater.journal.entry import Entry
from headwater.journal.fs_store import FsStore
store = FsStore({str(tmp_path)!r}, durability="flush", flush_interval=3600)
store.create_segment(*{ids})
store.append(*{ids}, Entry("x"))
os.fdatasync = lambda fd: print("synced")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "synced\n"


def test_a_store_that_is_closed_leaves_no_file_open(tmp_path: Path) -> None:
    before = _open_files()
    with FsStore(tmp_path, durability="flush") as store:
        made = [make(store)[0] for _ in range(20)]
        for turn in range(3):
            for ids in made:
                assert store.append(*ids, Entry("x")).seq == turn + 1
    assert _open_files() == before


def test_a_lock_that_stays_taken_is_told_with_its_holder(tmp_path: Path) -> None:
    with FsStore(tmp_path, lock_timeout=0.05) as store:
        ids, _ = make(store)
        other = FsStore(tmp_path, lock_timeout=0.05)
        with store._locked(*ids), pytest.raises(BusyError, match=f"process {os.getpid()} on"):
            other.append(*ids, Entry("x"))
        other.close()
        store.append(*ids, Entry("x"))


def test_a_log_that_was_removed_by_hand_is_noticed(store: FsStore) -> None:
    ids, log = make(store)
    store.append(*ids, Entry("x"))
    log.unlink()
    with pytest.raises(SegmentNotFoundError):
        store.append(*ids, Entry("y"))


def test_traces_rotate_and_stay_small(tmp_path: Path) -> None:
    with FsStore(tmp_path, trace_bytes=1000) as store:
        ids, _ = make(store)
        for number in range(200):
            assert store.append_trace(*ids, {"n": number, "pad": "p" * 50})
        files = list((tmp_path / "trace").rglob("*.jsonl"))
        assert len(files) == 3
        assert all(file.stat().st_size <= 1000 for file in files)
        kept = [record["n"] for record in store.iter_trace(*ids)]
        assert kept == list(range(kept[0], 200))


def test_a_trace_that_fails_never_hurts_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario aa; 43: a failing side write does not stop the run."""
    (tmp_path / "trace").write_text("in the way")
    with FsStore(tmp_path) as store, caplog.at_level(logging.WARNING):
        ids, _ = make(store)
        for value in ("text", object(), "\ud800"):
            assert not store.append_trace(*ids, {"value": value})
        store.append(*ids, Entry("x"))
        assert store.read_entry_count(*ids) == 1
        assert list(store.iter_trace(*ids)) == []
    assert len(caplog.records) == 1


def test_files_of_format_version_one_stay_readable(tmp_path: Path) -> None:
    """Golden files: never rewritten. One plain, one with batches, keys, CRLF, blank lines and a torn tail."""
    session = "0190b0a0-0000-7000-8000-000000000001"
    plain, odd = "0190b0a0-0000-7000-8000-000000000002", "0190b0a0-0000-7000-8000-000000000003"
    root = FIXTURES / "v1"
    with FsStore(root) as store:
        assert store.list_segments(session) == [odd, plain]
        assert str(store.head(session, plain)) == "5-ef75c69c"
        assert verify(store, session, plain).ok
        state = replay(store.read_all(session, plain))
        assert (state.pipeline, state.entries_count, state.interrupted) == ("shop-mirror", 5, False)
        assert str(store.head(session, odd)) == "4-920fa29b"
        found = verify(store, session, odd)
        assert (found.ok, found.torn_bytes) == (True, 22)
        read = store.read_all(session, odd)
        assert [(e.kind, e.key, e.batch) for e in read] == [
            ("segment_start", None, None),
            ("from_the_future", "k-1", None),
            ("barrier", None, (1, 2)),
            ("epoch_end", "k-2", (2, 2)),
        ]
        assert read[1].fields["big"] == 2**80
        assert read[1].fields["text"] == "a\u2028b\0c 🌊"


def test_a_store_reads_and_lists_without_making_its_directory(tmp_path: Path) -> None:
    with FsStore(tmp_path / "none") as store:
        assert store.list_sessions() == []
        assert store.list_segments(new_id()) == []
        assert not store.exists(new_id(), new_id())
    assert not (tmp_path / "none").exists()
