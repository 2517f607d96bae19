"""Journal: what an append, a head check and a read cost beside the bare work.

Each figure is a ratio against a bound that the same run measures: `json.dumps` + one `os.write` for an append without
sync, write + fdatasync for one with, reading the file for the head check, `json.loads` of the same lines for a read.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from _harness import Figure, interleaved, main, progress, scratch
from headwater.journal.codec import Prepared, line
from headwater.journal.entry import Durability, Entry, new_id
from headwater.journal.fs_store import FsStore
from headwater.journal.store import Store

FIELDS = {
    "epoch": 432_345_564_227_567_616,
    "prev": 432_345_564_227_502_080,
    "barrier": "CHECKPOINT",
    "tables": ["public.orders", "public.items"],
    "rows": 12_345,
    "source": "shop",
    "note": "sealed at a commit",
}


def _segment(store: Store) -> tuple[str, str]:
    session, segment = new_id(), new_id()
    store.create_segment(session, segment)
    return session, segment


def _bare(path: Path, sync: bool) -> Callable[[int], None]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def run(count: int) -> None:
        for number in range(count):
            record = {"v": 1, "seq": number, "ts": time.time_ns() // 1_000_000, "kind": "barrier", **FIELDS}
            os.write(fd, json.dumps(record).encode() + b"\n")
            if sync:
                os.fdatasync(fd)

    return run


def _append(root: Path, durability: Durability, count: int, times: int) -> tuple[float, float]:
    """Seconds per append: ours, bare."""
    store = FsStore(root / durability, durability=durability)
    ids = _segment(store)
    entry = Entry("barrier", FIELDS)
    bare = _bare(root / f"bare-{durability}", sync=False)

    def ours() -> None:
        for _ in range(count):
            store.append(*ids, entry)

    own, bound = interleaved(times, ours, lambda: bare(count))
    store.close()
    return own / count, bound / count


def _synced_append(root: Path, count: int) -> tuple[float, float]:
    """Median seconds of one append with fsync: ours, bare.

    One of each in turn: the disk decides the time of a single sync, so a best of few says more about it than about us.
    """
    store = FsStore(root / "fsync", durability=Durability.FSYNC)
    ids = _segment(store)
    entry = Entry("barrier", FIELDS)
    bare = _bare(root / "bare-fsync", sync=True)
    own, bound = [], []
    for _ in range(count):
        start = time.perf_counter()
        store.append(*ids, entry)
        middle = time.perf_counter()
        bare(1)
        own.append(middle - start)
        bound.append(time.perf_counter() - middle)
    store.close()
    return statistics.median(own), statistics.median(bound)


def _big_segment(store: FsStore, size: int) -> tuple[str, str]:
    """A segment of *size* bytes in lines of a kilobyte, written straight to the file."""
    ids = _segment(store)
    text = json.dumps({**FIELDS, "note": "n" * 800}, separators=(",", ":"))
    item = Prepared(1_700_000_000_000, b'"barrier"', b"," + text[1:-1].encode())
    seq = crc = written = 0
    with Path(store.location(*ids)).open("wb") as file:
        while written < size:
            seq += 1
            data, crc = line(item, seq, 0, crc)
            file.write(data)
            written += len(data)
    return ids


def _head(root: Path) -> tuple[float, float]:
    """Heads per second of a 200 MB segment, and reads of all its bytes per second."""
    store = FsStore(root / "head", durability=Durability.NONE)
    ids = _big_segment(store, 200 << 20)
    path = Path(store.location(*ids))

    def read() -> None:
        with path.open("rb") as file:
            sum(1 for _ in file)

    def heads() -> None:
        for _ in range(100):
            store.head(*ids)

    read()
    ours, bound = interleaved(3, heads, read)
    store.close()
    return 100 / ours, 1 / bound


def _read(root: Path, count: int, times: int) -> tuple[float, float]:
    """Entries per second: `read_all`, and `json.loads` over the same lines."""
    store = FsStore(root / "read", durability=Durability.NONE)
    ids = _segment(store)
    store.truncate(*ids, 0)
    for begin in range(0, count, 1000):
        store.append(*ids, [Entry("barrier", {**FIELDS, "n": begin + n}) for n in range(min(1000, count - begin))])
    path = Path(store.location(*ids))

    def bare() -> list[object]:
        return [json.loads(data) for data in path.read_bytes().split(b"\n")[:-1]]

    ours, bound = interleaved(times, lambda: store.read_all(*ids), bare)
    store.close()
    return count / ours, count / bound


def measure(quick: bool) -> list[Figure]:
    with scratch() as root:
        with progress("append without sync"):
            none = _append(root, Durability.NONE, 2_000 if quick else 10_000, 7)
        with progress("append with flush"):
            flush = _append(root, Durability.FLUSH, 2_000 if quick else 10_000, 5)
        with progress("append with fsync"):
            fsync = _synced_append(root, 1_000 if quick else 5_000)
        with progress("head of a 200 MB segment"):
            head = _head(root)
        with progress("read"):
            read = _read(root, 10_000 if quick else 50_000, 7)
    return [
        Figure("append, durability none / json.dumps + write", *none, goal=3.0, better="lower", unit="s"),
        Figure("append, durability flush / json.dumps + write", *flush, goal=None, better="lower", unit="s"),
        Figure("append, durability fsync / write + fdatasync", *fsync, goal=1.2, better="lower", unit="s"),
        Figure("head of 200 MB / reading it", *head, goal=1000.0, better="higher", unit="/s"),
        Figure("read_all / json.loads of the lines", *read, goal=0.6, better="higher", unit="/s"),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
