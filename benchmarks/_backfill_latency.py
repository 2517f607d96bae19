"""From the commit of a transaction to the version of the mirror that has it, told by the mirror's own log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _backfill_writer import Commits

STAMP_COLUMN = "quantity"


def latencies(table: Path, commits: Commits, since: float) -> NDArray[np.float64]:
    """Seconds of each transaction that was committed after *since* and is in the Delta table at *table*."""
    visible = np.full(len(commits.times), np.inf)
    seen = 0
    for version in sorted((table / "_delta_log").glob("*.json")):
        upto = commits.before(_greatest_stamp(version))
        visible[seen:upto] = version.stat().st_mtime
        seen = max(seen, upto)
    times = np.array(commits.times)
    waited: NDArray[np.float64] = (visible - times)[times > since]
    return waited[np.isfinite(waited)]


def _greatest_stamp(version: Path) -> int:
    greatest = 0
    for line in version.read_text().splitlines():
        added = json.loads(line).get("add")
        if added:
            greatest = max(greatest, json.loads(added["stats"])["maxValues"].get(STAMP_COLUMN, 0))
    return greatest
