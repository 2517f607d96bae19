"""Compaction: the newest runs of a table, those of about one size, become one; block by block, in little memory.

A merge changes nothing that anybody reads: whoever reads goes on with the runs that it has opened, and the manifest
that names the new run in their place is put beside whatever else was committed meanwhile. One process merges a table at
a time (a lock, which goes with the process); what a merge that died has left is removed by the next.

A merge of the oldest runs leaves out what is deleted: then the run has whole rows alone.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import Final

import pyarrow as pa

from headwater import failpoints
from headwater.sources.table import SourceTable
from headwater.system.files import make_private, open_private
from headwater.versioned.folder import KEPT_SECONDS, TableFolder
from headwater.versioned.manifest import Manifest
from headwater.versioned.merge import merged, run_heads
from headwater.versioned.net_rows import Piece
from headwater.versioned.run_file import RunInfo, RunReader, RunWriter

MERGE_RUNS: Final = 8
"""So many runs of about one size are merged to one."""
SMALL_BYTES: Final = 256 << 10
MANY_RUNS: Final = 32
INLINE_BYTES: Final = 16 << 20
"""A merge of more than this is not waited for."""
MERGED: Final = "merged-"
LOCK: Final = ".compaction"

BEFORE_MERGE = failpoints.register("versioned.before_merge")
AFTER_MERGE = failpoints.register("versioned.after_merge")

_END: Final = b"\xff\xff\xff"
_under_way: dict[str, Thread] = {}
_guard = Lock()


def to_merge(runs: Sequence[RunInfo], count: int = MERGE_RUNS) -> tuple[RunInfo, ...]:
    """The newest runs that are to be one, each small or not much larger than all that are newer.

    None: there are too few. A row is written anew a few times only until it is in a large run.
    """
    newer, first = 0, len(runs)
    for place in range(len(runs) - 1, -1, -1):
        size = runs[place].size
        if newer and size > max(SMALL_BYTES, newer * 5 // 4):
            break
        newer += size
        first = place
    if len(runs) - first < count and len(runs) > MANY_RUNS:
        first = len(runs) // 2
    found = tuple(runs[first:])
    return found if len(found) >= count else ()


def compact(
    folder: TableFolder, count: int = MERGE_RUNS, *, everything: bool = False, kept_seconds: float = KEPT_SECONDS
) -> int:
    """Merge until there is nothing to merge; how many merges there were. Nothing if another process is at it.

    :param everything: make one run of all.
    """
    done = 0
    with _alone(folder) as is_alone:
        if not is_alone:
            return 0
        folder.remove_unnamed(lambda name: name.startswith(MERGED))
        while True:
            newest = folder.newest()
            chosen = newest.runs if everything else to_merge(newest.runs, count)
            if newest.table is None or not chosen or (len(chosen) == 1 and chosen[0].plain):
                break
            _merge(folder, newest, chosen)
            done += 1
    folder.forget(kept_seconds)
    return done


def compact_soon(folder: TableFolder, count: int = MERGE_RUNS, kept_seconds: float = KEPT_SECONDS) -> None:
    """The same; what takes long goes on in a thread of its own, which ends with the process."""
    chosen = to_merge(folder.newest().runs, count)
    if not chosen:
        folder.forget(kept_seconds)
        return
    if sum(run.size for run in chosen) <= INLINE_BYTES:
        compact(folder, count, kept_seconds=kept_seconds)
        return
    with _guard:
        known = _under_way.get(str(folder.path))
        if known is None or not known.is_alive():
            made = Thread(target=compact, args=(folder, count), kwargs={"kept_seconds": kept_seconds}, daemon=True)
            _under_way[str(folder.path)] = made
            made.start()


def merged_rows(runs: Sequence[RunReader], table: SourceTable, *, is_whole: bool) -> Iterator[pa.RecordBatch]:
    """The rows of *runs*, the oldest first, with the columns of a piece. :param is_whole: there are no older ones."""
    keys = table.key_columns
    sources = [run_heads(run, b"", _END, table.schema, keys) for run in runs]
    for found in merged(sources):
        if isinstance(found, Piece):
            yield found.finished() if is_whole else found.rows
        elif is_whole and not all(run.info.plain for run in runs):
            yield Piece(found, pa.array([], pa.binary())).finished()
        else:
            yield found


def _merge(folder: TableFolder, newest: Manifest, chosen: Sequence[RunInfo]) -> None:
    assert newest.table is not None
    failpoints.hit(BEFORE_MERGE)
    is_whole = chosen[0] == newest.runs[0]
    runs = [folder.open(run) for run in chosen]
    path = folder.runs / f"{MERGED}{uuid.uuid4().hex}.run"
    is_plain = is_whole or all(run.plain for run in chosen)
    writer = RunWriter(path, newest.table.schema, newest.table.key_columns, plain=is_plain)
    made = writer.write_all(merged_rows(runs, newest.table, is_whole=is_whole))
    names = [run.name for run in chosen]

    def replaced(now: Manifest) -> Manifest | None:
        known = [run.name for run in now.runs]
        if names[0] not in known:  # the table was truncated meanwhile
            return None
        place = known.index(names[0])
        assert known[place : place + len(names)] == names
        after = (*now.runs[:place], *((made,) if made is not None else ()), *now.runs[place + len(names) :])
        return now.following(runs=after)

    folder.change(replaced)
    failpoints.hit(AFTER_MERGE)


@contextmanager
def _alone(folder: TableFolder) -> Iterator[bool]:
    """Whether this process alone merges the table meanwhile."""
    make_private(folder.path)
    with open_private(folder.path / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
