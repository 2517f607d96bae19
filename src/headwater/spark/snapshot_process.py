"""The snapshot in which all tasks of a batch read: a process of its own keeps it open.

The process in which Spark plans a read is gone a minute later, and nobody is told when the tasks are done. So this one
looks at the marks that tasks leave in a folder: it ends when all parts were read, when none has been touched for long,
or when Spark is gone. On another machine the marks are not seen; there the time that was given is what counts.
"""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow as pa

from headwater.errors import HeadwaterError
from headwater.private_files import FILE_MODE
from headwater.process import start_ticks
from headwater.sources.errors import UnsupportedTable
from headwater.sources.snapshots import ExportedSnapshot, open_snapshots
from headwater.sources.splits import KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable
from headwater.spark.child import Child, received, tell, tell_error
from headwater.spark.errors import SparkError
from headwater.spark.options import SPLIT_ROWS, SourceOptions
from headwater.spark.pushdown import Bounds, narrowed

START_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 1.0
_GRACE_SECONDS: Final = 15.0
"""After all parts were read: a task may be tried again."""
_READ: Final = ".read"
_PARTS: Final = 8
"""So many parts for each task that runs at a time, where there are rows enough: a part costs a tenth of a second."""
_MOST_ROWS: Final = 1_000_000
"""A part that is read again after a failure should not be larger."""


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A snapshot that is kept open elsewhere.

    :ivar table: as it is in the snapshot. :ivar parts: what tasks read, the largest first.
    :ivar position: of its rows. :ivar folder: for the marks of tasks.
    """

    name: str
    table: SourceTable
    kind: SplitKind
    parts: tuple[KeyRange, ...]
    position: bytes
    time_us: int
    folder: str


def keep_snapshot(options: SourceOptions, table: SourceTable, bounds: Bounds | None = None) -> KeptSnapshot:
    """Export a snapshot of now, have it kept, and plan the splits of *table* in it.

    :param bounds: of the first key column: splits are made by key, and only within them, where keys order the rows.
    :raises SparkError: it could not be had; the message is the source's.
    """
    folder = tempfile.mkdtemp(prefix="headwater-read-")
    child = Child(
        __name__,
        {
            "source": options.source,
            "table": base64.b64encode(pickle.dumps((table, bounds))).decode(),
            "split_rows": options.split_rows,
            "parallelism": options.parallelism,
            "seconds": options.snapshot_seconds,
            "folder": folder,
            "watched": os.getppid(),
        },
        forks=True,
    )
    seconds = max(START_SECONDS, options.snapshot_seconds)
    told = child.line(seconds)
    if told is None or "kept" not in told:
        told = told or _silent(child, seconds)
        child.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise SparkError(told["error"], next_step=told.get("next_step"))
    child.leave()
    kept = pickle.loads(base64.b64decode(told["kept"]))
    assert isinstance(kept, KeptSnapshot)
    return kept


def _silent(child: Child, seconds: float) -> dict[str, str]:
    """What is told of a process that told nothing."""
    if not child.is_running():
        return {"error": "The snapshot could not be taken: its process ended without a word."}
    return {
        "error": f"The splits of the table could not be planned within {seconds:g} s.",
        "next_step": "Look whether a lock on the table is held; for a very large table, raise option snapshotSeconds.",
    }


def marked(folder: str, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """*batches* of part *number*; that they are read is marked, where the folder can be seen."""
    place = Path(folder)
    if not place.is_dir():
        yield from batches
        return
    for batch in batches:
        _touch(place / str(number))
        yield batch
    _touch(place / f"{number}{_READ}")


def _touch(path: Path) -> None:
    try:
        path.touch(FILE_MODE)
    except OSError:
        pass  # the snapshot has ended, and the folder with it


def main() -> None:
    """Keep a snapshot."""
    told = received()
    watched, ticks = told["watched"], start_ticks(told["watched"])
    folder = Path(told["folder"])
    try:
        table, bounds = pickle.loads(base64.b64decode(told["table"]))
        snapshot = open_snapshots(told["source"]).export()
        try:
            table = snapshot.table(table)
            parts, kind = _parts(snapshot, table, bounds, told["split_rows"], told["parallelism"])
            position = snapshot.mark.high.position_after(None)
            now_us = time.time_ns() // 1000
            kept = KeptSnapshot(snapshot.name, table, kind, parts, position, now_us, str(folder))
            tell({"kept": base64.b64encode(pickle.dumps(kept)).decode()})
            while (
                _is_needed(folder, len(parts), told["seconds"]) and start_ticks(watched) == ticks and snapshot.is_open()
            ):
                time.sleep(_LOOK_SECONDS)
        finally:
            snapshot.close()
    except HeadwaterError as error:
        tell_error(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parts(
    snapshot: ExportedSnapshot, table: SourceTable, bounds: Bounds | None, split_rows: int | None, parallelism: int
) -> tuple[tuple[KeyRange, ...], SplitKind]:
    """What tasks read; with *split_rows*, splits of so many rows, else as many as suit."""
    plan, rows = None, split_rows or SPLIT_ROWS
    if bounds is not None and bounds != Bounds():
        with suppress(UnsupportedTable):  # keys do not order its rows: all are read, and Spark filters them
            plan = snapshot.plan(table, split_rows=rows, kind=SplitKind.KEY)
    if plan is None:
        bounds, plan = None, _whole(snapshot, table, rows)
    splits = [split for split in plan.splits if not split.empty]
    if split_rows is None:
        splits = _joined(splits, max(_PARTS * parallelism, plan.rows // _MOST_ROWS))
    ranges = [split.range for split in sorted(splits, key=lambda split: -split.rows)]
    if bounds is not None:
        ranges = [part for part in (narrowed(part, bounds) for part in ranges) if part is not None]
    return tuple(ranges), plan.kind


def _whole(snapshot: ExportedSnapshot, table: SourceTable, split_rows: int) -> SplitPlan:
    """By heap where there is one: all is read in one snapshot, so that nothing but the cost of a scan matters."""
    try:
        return snapshot.plan(table, split_rows=split_rows, kind=SplitKind.HEAP)
    except UnsupportedTable:
        return snapshot.plan(table, split_rows=split_rows)


def _joined(splits: Sequence[Split], most: int) -> list[Split]:
    """Neighbours joined until there are at most *most*."""
    count = min(most, len(splits))
    cuts = [len(splits) * number // count for number in range(count + 1)] if count else []
    return [
        Split(
            number, KeyRange(splits[low].range.start, splits[high - 1].range.end), sum(s.rows for s in splits[low:high])
        )
        for number, (low, high) in enumerate(pairwise(cuts))
    ]


def _is_needed(folder: Path, parts: int, seconds: float) -> bool:
    marks = [path.stat() for path in folder.iterdir()]
    read = sum(1 for _ in folder.glob(f"*{_READ}"))
    last = max((mark.st_mtime for mark in marks), default=folder.stat().st_mtime)
    return time.time() - last < (_GRACE_SECONDS if read >= parts else seconds)
