"""Kill the process at every durable step: what is there afterwards is the old or the new, never less, never half.

Scenario l, and its like for append, delete, fork, repair and prune. Every registered failpoint of the journal
is a case; one without a row in the table below fails.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.crash.journal.children import open_store
from tests.crash.journal.launch import finish, start

from headwater import failpoints
from headwater.journal.damage import repair, verify
from headwater.journal.entry import Entry, new_id
from headwater.journal.errors import SegmentDeletedError
from headwater.journal.fork import children, origin_of
from headwater.journal.fs_store import FsStore
from headwater.journal.store import Store

JOURNAL_FAILPOINTS = sorted(name for name in failpoints.registered() if name.startswith("journal."))

# failpoint prefix -> action of the child
ACTIONS = {
    "journal.fs.append.": "append",
    "journal.fs.tail.": "append",
    "journal.fs.create.": "create",
    "journal.fs.cut.": "truncate",
    "journal.fs.delete_session.": "delete-session",
    "journal.fork.": "fork",
    "journal.repair.": "repair",
    "journal.rescue.": "rescue",
    "journal.prune.": "prune",
}

# The step is over when these are passed: the new state must be there.
DONE = {
    "journal.fs.append.after_write",
    "journal.fs.append.after_sync",
    "journal.fs.create.after_link",
    "journal.fs.create.after_unlink",
    "journal.fs.create.after_directory_sync",
    "journal.fs.cut.after_cut",
    "journal.fs.cut.after_sync",
    "journal.fork.after_create",
    "journal.repair.after_cut",
}


def numbers(store: Store, session: str, segment: str) -> list[int]:
    return [entry.fields["n"] for entry in store.read_all(session, segment)]


@pytest.mark.parametrize("name", JOURNAL_FAILPOINTS)
def test_a_kill_at_a_durable_step_leaves_the_old_or_the_new(name: str, tmp_path: Path) -> None:
    action = next((action for prefix, action in ACTIONS.items() if name.startswith(prefix)), "")
    assert action, f"failpoint {name} has no crash test: give it a row in ACTIONS"
    session, segment, extra = new_id(), new_id(), new_id()
    with open_store(tmp_path) as store:
        store.create_segment(session, segment, [Entry("old", {"n": n}) for n in (1, 2, 3)])
        path = Path(store.location(session, segment))
        if name.startswith("journal.fs.tail."):
            path.write_bytes(path.read_bytes() + b'{"v":1,"seq":4,"ts')
        if action in ("repair", "rescue"):
            path.write_bytes(path.read_bytes().replace(b'"n":2', b'"n":8'))
    before = path.read_bytes()

    finish(start("step", tmp_path, action, session, segment, extra, failpoints=f"{name}=kill"), -signal.SIGKILL)

    done = name in DONE
    with open_store(tmp_path) as store:
        if action == "append":
            assert numbers(store, session, segment) == ([1, 2, 3, 4, 5] if done else [1, 2, 3])
        elif action == "create":
            assert store.exists(session, extra) == done
            assert sorted(store.list_segments(session)) == sorted([segment, extra] if done else [segment])
            if done:
                assert numbers(store, session, extra) == [1, 2]
            else:
                store.create_segment(session, extra, [Entry("new", {"n": 1})])
        elif action == "truncate":
            assert numbers(store, session, segment) == ([1] if done else [1, 2, 3])
            if done and isinstance(store, FsStore):
                saved = b"".join(file.read_bytes() for file in path.parent.glob("*.saved"))
                assert path.read_bytes() + saved == before
        elif action == "delete-session":
            gone = name.endswith("after_removal")
            assert store.exists(session, segment) != gone
            if not gone:
                assert numbers(store, session, segment) == [1, 2, 3]
            with pytest.raises(SegmentDeletedError):
                store.create_segment(session, extra)
            assert store.delete_session(session) != gone
            assert not path.parent.exists()
            return
        elif action == "fork":
            assert path.read_bytes() == before
            made = children(store, session, segment)
            assert len(made) == int(done)
            for branch in made:
                assert store.read_entry_count(branch.session, branch.segment) == 1
                assert origin_of(store, branch.session, branch.segment) is not None
        elif action == "repair":
            saved = b"".join(file.read_bytes() for file in path.parent.glob("*.saved"))
            assert (path.read_bytes() + saved if done else path.read_bytes()) == before
            repair(store, session, segment)
        elif action == "rescue":
            assert path.read_bytes() == before
            assert store.list_segments(session) == [segment]
            repair(store, session, segment)
        elif action == "prune":
            assert store.exists(session, segment)

        # whatever happened: it is sound, and goes on
        assert verify(store, session, segment).ok
        head = store.head(session, segment)
        assert store.append(session, segment, Entry("later", {"n": 9}), expected_head=head).seq == head.seq + 1


def test_what_a_crashed_creation_left_is_ignored_and_swept(tmp_path: Path) -> None:
    """Scenario l: temporary names are not listed, and go when they are old."""
    session, segment, extra = new_id(), new_id(), new_id()
    with open_store(tmp_path) as store:
        store.create_segment(session, segment)
        arguments = ("step", tmp_path, "create", session, segment, extra)
        finish(start(*arguments, failpoints="journal.fs.create.after_write=kill"), -signal.SIGKILL)
        (left,) = (tmp_path / "journal" / session).glob(".*.tmp")
        assert store.list_segments(session) == [segment]
        store.create_segment(session, new_id())
        assert left.exists(), "it may belong to a creation that is still running"
        long_ago = time.time() - 3600
        os.utime(left, (long_ago, long_ago))
        store.create_segment(session, new_id())
        assert not left.exists()
