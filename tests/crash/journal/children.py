"""Programs that tests run as child processes: `python -m tests.crash.journal.children NAME ARGUMENTS…`.

Each works on a store that its test prepared; most of them are killed before they end.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from headwater.journal.damage import repair, rescue, verify
from headwater.journal.entry import Durability, Entry, Head, new_id
from headwater.journal.errors import (
    AlreadyExistsError,
    HeadConflictError,
    NoRoomError,
    SegmentCutError,
    SegmentDeletedError,
)
from headwater.journal.fork import fork_at
from headwater.journal.fs_store import FsStore
from headwater.journal.retention import prune
from headwater.journal.store import Store


def open_store(root: Path, durability: str = "fsync") -> Store:
    """The store that tests and children share."""
    return FsStore(root / "journal", durability=Durability(durability))


def step(root: str, action: str, session: str, segment: str, extra: str) -> None:
    """One call of the matrix of failpoints; meant to die in it."""
    store = open_store(Path(root))
    if action == "append":
        store.append(session, segment, [Entry("new", {"n": 4}), Entry("new", {"n": 5})])
    elif action == "create":
        store.create_segment(session, extra, [Entry("new", {"n": 1}), Entry("new", {"n": 2})])
    elif action == "truncate":
        store.truncate(session, segment, 1)
    elif action == "delete-session":
        store.delete_session(session)
    elif action == "fork":
        fork_at(store, session, segment, 2)
    elif action == "repair":
        repair(store, session, segment)
    elif action == "rescue":
        rescue(store, session, segment)
    elif action == "prune":
        prune(store, older_than_ms=0, now=time.time_ns() // 1_000_000 + 1000, dry_run=False)
    else:
        raise SystemExit(f"no such action: {action}")


def write_numbers(root: str, durability: str, session: str, segment: str) -> None:
    """Append numbers for ever, in turn alone and in batches of three, and acknowledge each on stdout."""
    store = open_store(Path(root), durability)
    number = store.read_entry_count(session, segment)
    while True:
        size = 1 if number % 2 else 3
        batch = [Entry("x", {"n": number + place, "pad": "p" * (number * 37 % 20_000)}) for place in range(size)]
        store.append(session, segment, batch[0] if size == 1 else batch)
        number += size
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


def write_sizes(root: str, session: str, segment: str, name: str, count: str) -> None:
    """Append entries of 100 B … 1 MB under a name; every seventh through a store that was just opened."""
    sizes = (100, 100, 3_000, 100, 20_000, 100, 100, 300, 100, 1_000_000)
    store = open_store(Path(root), "none")
    for turn in range(int(count)):
        entry = Entry("x", {"name": name, "turn": turn, "pad": name[0] * sizes[turn % len(sizes)]})
        if turn % 7 == 0:
            with open_store(Path(root), "none") as fresh:
                fresh.append(session, segment, entry)
        else:
            store.append(session, segment, entry)
    store.close()


def swap(root: str, session: str, segment: str, name: str, wins: str) -> None:
    """Win `wins` compare-and-swaps against the others; a loser goes on from the head that it was told."""
    store = open_store(Path(root), "none")
    head = store.head(session, segment)
    won = 0
    while won < int(wins):
        try:
            head = store.append(session, segment, Entry("x", {"name": name, "after": str(head)}), expected_head=head)
            won += 1
        except HeadConflictError as conflict:
            head = conflict.current
    store.close()


def cut_and_grow(root: str, session: str, segment: str, rounds: str) -> None:
    """Take the newest entry off and put another there, over and over."""
    store = open_store(Path(root), "none")
    for turn in range(int(rounds)):
        head = store.head(session, segment)
        try:
            store.truncate(session, segment, head.seq - 1, expected_head=head)
            store.append(session, segment, Entry("again", {"turn": turn, "pad": "q" * (turn * 91 % 5000)}))
        except HeadConflictError:
            continue
    store.close()


def read_always(root: str, session: str, segment: str, seconds: str) -> None:
    """Read in every way while others write: what comes is whole and gapless."""
    store = open_store(Path(root), "none")
    end = time.monotonic() + float(seconds)
    rounds = 0
    while time.monotonic() < end:
        read = store.read_all(session, segment)
        assert [entry.seq for entry in read] == list(range(1, len(read) + 1))
        head = store.head(session, segment)
        assert isinstance(head, Head)
        try:
            newest = store.tail(session, segment, 5)
            seqs = [entry.seq for entry in newest]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        except SegmentCutError:
            pass
        rounds += 1
    sys.stdout.write(f"{rounds}\n")
    store.close()


def fill_disk(root: str, session: str, segment: str) -> None:
    """Run into a real file size limit, then get room again."""
    store = open_store(Path(root), "none")
    path = Path(store.location(session, segment))
    good = path.read_bytes()
    limit = len(good) + 5_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for too_much in ([Entry("big", {"pad": "p" * 20_000})], [Entry("a", {"pad": "p" * 3000})] * 2):
        try:
            store.append(session, segment, too_much)
        except NoRoomError:
            assert path.read_bytes() == good
        else:
            raise SystemExit("the limit was not felt")
    store.append(session, segment, Entry("small"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.append(session, segment, Entry("big", {"pad": "p" * 20_000}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    other = segment[:-4] + "0000"
    try:
        store.create_segment(session, other, [Entry("big", {"pad": "p" * 20_000})])
    except NoRoomError:
        assert not store.exists(session, other)
        assert not list(path.parent.glob(".*"))
    else:
        raise SystemExit("the limit was not felt")
    try:
        store.truncate(session, segment, 1)
    except NoRoomError:  # no room to save the suffix: nothing is cut
        assert store.read_entry_count(session, segment) == 5
    else:
        raise SystemExit("the limit was not felt")
    store.close()


def read_big(root: str, session: str, segment: str, count: str) -> None:
    """Read a big segment in every way; print the growth of this process in kilobytes."""
    store = open_store(Path(root), "none")
    store.head(session, segment)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = int(count)
    assert store.head(session, segment).seq == total
    assert [entry.seq for entry in store.tail(session, segment, 3)] == [total - 2, total - 1, total]
    assert sum(1 for _ in store.iter(session, segment)) == total
    assert len(store.tail(session, segment, 30)) == 30
    middle = total // 2
    assert next(store.iter(session, segment, from_seq=middle)).seq == middle
    assert verify(store, session, segment).ok
    assert store.append(session, segment, Entry("x"), idempotency_key="k").seq == total + 1
    store.truncate(session, segment, total - 100)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{after - before}\n")
    store.close()


def append_keys(root: str, session: str, segment: str, count: str) -> None:
    """Append under the same keys as other processes do; print the heads that came back."""
    store = open_store(Path(root), "none")
    for number in range(int(count)):
        head = store.append(session, segment, Entry("x", {"pid": os.getpid()}), idempotency_key=f"k{number}")
        sys.stdout.write(f"{head}\n")
    store.close()


def create_many(root: str, session: str, wanted: str, tag: str) -> None:
    """Create the segments that *wanted* (a file) names; print those that this process made."""
    store = open_store(Path(root), "none")
    for segment in Path(wanted).read_text().split():
        try:
            store.create_segment(session, segment, [Entry(tag)])
        except AlreadyExistsError:
            continue
        except SegmentDeletedError:
            sys.stdout.write("deleted\n")
            break
        sys.stdout.write(f"{segment}\n")
        sys.stdout.flush()
    store.close()


def create_until_deleted(root: str, session: str) -> None:
    """Create segments until the session is gone; print how many were acknowledged."""
    store = open_store(Path(root), "none")
    count = 0
    try:
        while True:
            store.create_segment(session, new_id(), [Entry("x")])
            count += 1
            if count == 1:
                sys.stdout.write("started\n")
                sys.stdout.flush()
    except SegmentDeletedError:
        sys.stdout.write(f"{count}\n")
    store.close()


def append_until_deleted(root: str, session: str, segment: str) -> None:
    """Append until the segment is gone; print how many were acknowledged."""
    store = open_store(Path(root), "none")
    count = 0
    try:
        while True:
            store.append(session, segment, Entry("x", {"n": count}))
            count += 1
            if count == 1:
                sys.stdout.write("started\n")
                sys.stdout.flush()
    except SegmentDeletedError:
        sys.stdout.write(f"{count}\n")
    store.close()


def hold(root: str, session: str) -> None:
    """Own the session until killed."""
    store = open_store(Path(root))
    held = store.own(session)
    sys.stdout.write(f"{held.owner.pid}\n")
    sys.stdout.flush()
    time.sleep(60)


_PROGRAMS = {
    f.__name__: f
    for f in (
        step,
        write_numbers,
        write_sizes,
        swap,
        cut_and_grow,
        read_always,
        fill_disk,
        read_big,
        append_keys,
        create_many,
        create_until_deleted,
        append_until_deleted,
        hold,
    )
}

if __name__ == "__main__":
    _PROGRAMS[sys.argv[1]](*sys.argv[2:])
