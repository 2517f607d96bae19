"""What a mirror shows: when it has each transaction; and how many files each version of a Delta table changes."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _backfill_writer import Commits
from _servers import Database

STAMP_COLUMN = "quantity"
_LOOK_SECONDS = 0.5


def latencies(table: Path, commits: Commits, since: float, seconds: float = 300.0) -> NDArray[np.float64]:
    """Seconds of each transaction that was committed after *since*, once the Delta table at *table* has them all.

    :raises RuntimeError: some are missing after *seconds*. To leave out what arrives late would flatter the figure.
    """
    end = time.monotonic() + seconds
    times = np.array(commits.times)
    while not np.isfinite(visible := _visible(table, commits)).all():
        if time.monotonic() > end:
            raise RuntimeError(f"{np.isinf(visible).sum()} transactions did not arrive at the mirror.")
        time.sleep(_LOOK_SECONDS)
    waited: NDArray[np.float64] = (visible - times)[times > since]
    return waited


def sql_latencies(target: Database, table: str, commits: Commits, since: float) -> NDArray[np.float64]:
    """Seconds of each transaction after *since*: the server keeps when the transaction of the sink was committed.

    A row that a later transaction changed again shows the later one: the result is never too short.

    :raises RuntimeError: the sink does not have them all.
    """
    query = (
        f"SELECT max(quantity), extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM {table} "
        f"WHERE quantity >= {commits.first} GROUP BY xmin"
    )
    end = time.monotonic() + 120
    while True:
        found = sorted((moment, stamp) for stamp, moment in target.execute(query))
        if found and max(stamp for _, stamp in found) >= commits.next_stamp - 1:
            break
        if time.monotonic() > end:
            raise RuntimeError("Some transactions did not arrive at the sink.")
        time.sleep(0.5)
    times, visible, seen = np.array(commits.times), np.full(len(commits.times), np.inf), 0
    for moment, stamp in found:
        upto = commits.before(stamp)
        visible[seen:upto] = moment
        seen = max(seen, upto)
    waited: NDArray[np.float64] = (visible - times)[times > since]
    return waited


def _visible(table: Path, commits: Commits) -> NDArray[np.float64]:
    """When the version that has each transaction became visible: its file was renamed then."""
    visible = np.full(len(commits.times), np.inf)
    seen = 0
    for version in sorted((table / "_delta_log").glob("*.json")):
        upto = commits.before(_greatest_stamp(version))
        visible[seen:upto] = version.stat().st_ctime
        seen = max(seen, upto)
    return visible


def _greatest_stamp(version: Path) -> int:
    greatest = 0
    for line in version.read_text().splitlines():
        added = json.loads(line).get("add")
        if added:
            greatest = max(greatest, json.loads(added["stats"])["maxValues"].get(STAMP_COLUMN, 0))
    return greatest


@dataclass(frozen=True, slots=True)
class Touched:
    """Files that versions of a mirror change. :ivar per_version: the median. :ivar files: of the whole mirror."""

    per_version: float
    files: int


def touched_files(table: Path, since: float) -> Touched:
    """Files whose rows were replaced or deleted by each version that became visible after *since*."""
    live: set[str] = set()
    touched: list[int] = []
    for version in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in version.read_text().splitlines()]
        removed = [action["remove"] for action in actions if "remove" in action]
        changed = {remove["path"] for remove in removed if remove.get("dataChange", True)}
        if changed and version.stat().st_ctime > since:
            touched.append(len(changed))
        live -= {remove["path"] for remove in removed}
        live |= {action["add"]["path"] for action in actions if "add" in action}
    if not touched:
        raise RuntimeError("No version of the mirror changed a file.")
    return Touched(statistics.median(touched), len(live))
