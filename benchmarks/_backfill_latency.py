"""From the commit of a transaction to the version of the mirror that has it, told by the mirror's own log."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _backfill_writer import Commits

STAMP_COLUMN = "quantity"
_LOOK_SECONDS = 0.5


def latencies(table: Path, commits: Commits, since: float, seconds: float = 300.0) -> NDArray[np.float64]:
    """Seconds of each transaction that was committed after *since*, once the Delta table at *table* has them all.

    :raises RuntimeError: it has not, after *seconds*: to leave out what came late would flatter it.
    """
    end = time.monotonic() + seconds
    times = np.array(commits.times)
    while not np.isfinite(visible := _visible(table, commits)).all():
        if time.monotonic() > end:
            raise RuntimeError(f"{np.isinf(visible).sum()} transactions did not come to the mirror.")
        time.sleep(_LOOK_SECONDS)
    waited: NDArray[np.float64] = (visible - times)[times > since]
    return waited


def _visible(table: Path, commits: Commits) -> NDArray[np.float64]:
    """When the version came that has each transaction: its file was renamed then."""
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
