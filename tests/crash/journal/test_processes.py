"""Several processes on one segment, and processes that die: nothing lost, merged or doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.crash.journal.children import open_store
from tests.crash.journal.launch import SOAK, finish, start

from headwater.journal.codec import Prepared, line
from headwater.journal.damage import verify
from headwater.journal.entry import EMPTY, Entry, new_id
from headwater.journal.fs_store import FsStore
from headwater.system.owner_lock import OwnedElsewhereError

ROUNDS = 200 if SOAK else 12


@pytest.mark.parametrize("durability", ["none", "fsync"])
def test_killed_writers_lose_nothing_that_they_acknowledged(durability: str, tmp_path: Path) -> None:
    """Scenario j: kill -9 in a loop; the reader sees a prefix, batches are whole, the next writer goes on."""
    session = new_id()
    chance = random.Random(7)
    with open_store(tmp_path, durability) as store:
        for turn in range(ROUNDS if durability == "none" or SOAK else ROUNDS // 2):
            if turn % 12 == 0:
                segment = new_id()
                store.create_segment(session, segment)
            child = start("write_numbers", tmp_path, durability, session, segment)
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.random() * 0.05)
            child.send_signal(signal.SIGKILL)
            out, _ = child.communicate()
            acknowledged = [int(text) for text in out.split("\n")[:-1]]
            read = store.read_all(session, segment)
            assert len(read) >= max(acknowledged, default=1)
            assert [entry.fields["n"] for entry in read] == list(range(len(read)))
            assert store.head(session, segment) == read[-1].head
            assert read[-1].batch in (None, (3, 3))
        assert verify(store, session, segment).ok
        store.append(session, segment, Entry("last"))


def test_many_processes_append_everything_once(tmp_path: Path) -> None:
    """Scenarios i, n: 100 B … 1 MB, some through stores just opened, which look for the end (and a torn tail) anew."""
    session, segment = new_id(), new_id()
    count = 200 if SOAK else 40
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment)
        names = ["a", "b", "c", "d"]
        writers = [start("write_sizes", tmp_path, session, segment, name, count) for name in names]
        for writer in writers:
            finish(writer)
        read = store.read_all(session, segment)
        assert [entry.seq for entry in read] == list(range(1, len(names) * count + 1))
        for name in names:
            mine = [entry for entry in read if entry.fields["name"] == name]
            assert [entry.fields["turn"] for entry in mine] == list(range(count))
            assert all(set(entry.fields["pad"]) == {name} for entry in mine)
        assert verify(store, session, segment).ok


def test_compare_and_swap_has_one_winner_per_head(tmp_path: Path) -> None:
    """Scenario o, between processes: every entry was written right after the head that its writer knew."""
    session, segment = new_id(), new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment)
        racers = [start("swap", tmp_path, session, segment, name, 60) for name in "abc"]
        for racer in racers:
            finish(racer)
        heads = [str(EMPTY)]
        for entry in store.read_all(session, segment):
            assert entry.fields["after"] == heads[-1]
            heads.append(str(entry.head))
        assert Counter(e.fields["name"] for e in store.iter(session, segment)) == {"a": 60, "b": 60, "c": 60}


def test_readers_see_whole_entries_while_others_append_and_truncate(tmp_path: Path) -> None:
    """Scenario v."""
    session, segment = new_id(), new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment, [Entry("x", {"pad": "p" * 500}) for _ in range(200)])
        reader = start("read_always", tmp_path, session, segment, 3 if not SOAK else 30)
        cutters = [start("cut_and_grow", tmp_path, session, segment, 300) for _ in range(2)]
        writer = start("write_sizes", tmp_path, session, segment, "w", 30)
        for child in (*cutters, writer):
            finish(child)
        assert int(finish(reader)) > 0
        assert verify(store, session, segment).ok


def test_a_key_used_by_several_processes_at_once_is_written_once(tmp_path: Path) -> None:
    """Scenario ee, between processes: all get the same head."""
    session, segment = new_id(), new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment)
        racers = [start("append_keys", tmp_path, session, segment, 100) for _ in range(3)]
        first, *others = [finish(racer) for racer in racers]
        assert all(other == first for other in others)
        assert sorted(e.key or "" for e in store.iter(session, segment)) == sorted(f"k{n}" for n in range(100))


def test_of_several_creators_of_one_segment_exactly_one_wins(tmp_path: Path) -> None:
    """Scenario q, between processes: whose content it is, is who was told so."""
    session, wanted = new_id(), [new_id() for _ in range(30)]
    (tmp_path / "wanted").write_text("\n".join(wanted))
    racers = {tag: start("create_many", tmp_path, session, tmp_path / "wanted", tag) for tag in "abc"}
    made = {tag: finish(racer).split() for tag, racer in racers.items()}
    assert sorted(name for names in made.values() for name in names) == sorted(wanted)
    with open_store(tmp_path) as store:
        for tag, names in made.items():
            for name in names:
                assert [entry.kind for entry in store.read_all(session, name)] == [tag]


def test_a_session_deleted_during_appends_stays_deleted(tmp_path: Path) -> None:
    """Scenario z: the writers are told, and nothing of it comes back."""
    session, segment = new_id(), new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment)
        writers = [start("append_until_deleted", tmp_path, session, segment) for _ in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
        time.sleep(0.1)
        assert store.delete_session(session)
        for writer in writers:
            assert int(finish(writer)) > 0
        assert not store.exists(session, segment)
        assert store.list_segments(session) == []
        assert not (tmp_path / "journal" / session).exists()


def test_nothing_is_created_in_a_session_after_its_deletion(tmp_path: Path) -> None:
    """Scenario z: creations that race with the deletion are deleted with it or refused."""
    session = new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, new_id())
        racers = [start("create_until_deleted", tmp_path, session) for _ in "ab"]
        for racer in racers:
            assert racer.stdout is not None
            racer.stdout.readline()
        assert store.delete_session(session)
        for racer in racers:
            assert int(finish(racer)) > 0
        assert store.list_segments(session) == []
        assert store.list_sessions() == []
        assert not (tmp_path / "journal" / session).exists()


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    """Scenario k: a real limit (RLIMIT_FSIZE) on append, batch, create and truncate."""
    session, segment = new_id(), new_id()
    with open_store(tmp_path, "none") as store:
        store.create_segment(session, segment, [Entry("x", {"pad": "p" * 1000}) for _ in range(3)])
        finish(start("fill_disk", tmp_path, session, segment))
        assert [e.kind for e in store.read_all(session, segment)] == ["x", "x", "x", "small", "big"]
        assert verify(store, session, segment).ok


def test_a_large_segment_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """1 GB with HEADWATER_SOAK=1, 200 MB otherwise: the reader's process grows by less than 48 MB."""
    session, segment = new_id(), new_id()
    size = 1 << 30 if SOAK else 200 << 20
    with open_store(tmp_path, "none") as store:
        assert isinstance(store, FsStore)
        store.create_segment(session, segment)
        item = Prepared(1000, b'"x"', b',"pad":"' + b"p" * 100_000 + b'"')
        seq = crc = written = 0
        with Path(store.location(session, segment)).open("wb") as file:
            while written < size:
                seq += 1
                data, crc = line(item, seq, 0, crc)
                file.write(data)
                written += len(data)
        grown = int(finish(start("read_big", tmp_path, session, segment, seq)))
        assert grown < 48 << 10, f"grew by {grown} KiB"


def test_the_owner_is_named_to_others_and_freed_by_its_death(tmp_path: Path) -> None:
    session = new_id()
    with open_store(tmp_path) as store:
        store.create_segment(session, new_id())
        child = start("hold", tmp_path, session)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        with pytest.raises(OwnedElsewhereError) as caught:
            store.own(session)
        assert caught.value.owner.pid == pid == child.pid
        child.kill()
        child.communicate()
        store.own(session).release()


def _in_child(job: object) -> int:
    """Run *job* in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert callable(job)
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("durability", ["none", "flush"])
def test_a_forked_child_and_its_parent_share_no_handles(durability: str, tmp_path: Path) -> None:
    session, segment = new_id(), new_id()
    with open_store(tmp_path, durability) as store:
        store.create_segment(session, segment)
        store.append(session, segment, Entry("parent", {"n": 0}))

        def child() -> None:
            for n in range(20):
                store.append(session, segment, Entry("child", {"n": n}))
            store.close()

        pid = os.fork()
        if pid == 0:
            try:
                child()
            finally:
                os._exit(0)
        for n in range(1, 21):
            store.append(session, segment, Entry("parent", {"n": n}))
        os.waitpid(pid, 0)
        read = store.read_all(session, segment)
        assert [e.fields["n"] for e in read if e.kind == "parent"] == list(range(21))
        assert [e.fields["n"] for e in read if e.kind == "child"] == list(range(20))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_owns_nothing_and_keeps_nothing_alive(tmp_path: Path) -> None:
    session = new_id()
    with open_store(tmp_path) as store:
        held = store.own(session)

        def child() -> None:
            with pytest.raises(OwnedElsewhereError):
                store.own(session)
            held.release()
            with pytest.raises(OwnedElsewhereError):
                store.own(session)

        assert _in_child(child) == 0
        held.release()
        store.own(session).release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_ids_of_parent_and_child_differ_and_increase(tmp_path: Path) -> None:
    """Scenario y, after fork: both go on from the same state in the same millisecond."""
    before = [new_id() for _ in range(3)]
    report = tmp_path / "ids"

    def child() -> None:
        report.write_text("\n".join(new_id() for _ in range(100)))

    assert _in_child(child) == 0
    theirs = report.read_text().split()
    ours = [new_id() for _ in range(100)]
    assert theirs == sorted(theirs)
    assert before[-1] < ours[0]
    assert len({*before, *theirs, *ours}) == 203
