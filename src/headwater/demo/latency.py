"""How long changes took: from their commit at the source, as the log has it, to the commit of the mirror's table that
brought them. Both are of this machine's clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store import LogView
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN
from headwater.state import Snapshot

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one log.

    :ivar epochs: the epoch of each. :ivar committed_ms: when each was committed. :ivar doubled: how many it has twice.
    """

    epochs: NDArray[np.uint64]
    committed_ms: Numbers
    doubled: int

    @classmethod
    def read(cls, view: Snapshot, log: str) -> Changes:
        """All that the log still has."""
        shown = LogView.open(view, log)
        batches = list(shown.read_range(shown.bounds().gone, shown.sealed))
        if not batches:
            return cls(np.zeros(0, np.uint64), np.zeros(0), 0)
        epochs = np.concatenate([batch.column("_epoch").to_numpy() for batch in batches])
        times = np.concatenate([batch.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()).to_numpy() for batch in batches])
        positions = pa.chunked_array([batch.column(POSITION_COLUMN) for batch in batches])
        return cls(epochs, times / 1000, len(epochs) - len(positions.unique()))


@dataclass(frozen=True, slots=True)
class MirrorCommits:
    """The commits of one Delta table.

    :ivar epochs: of those that brought changes, in order: up to which epoch. :ivar visible_ms: when they could be seen.
    :ivar history_ms: when the last one that brought history could be seen; 0 before the first.
    """

    epochs: NDArray[np.uint64]
    visible_ms: Numbers
    history_ms: float

    @classmethod
    def read(cls, table: Path) -> MirrorCommits:
        found = list(_commits(table / "_delta_log"))
        changes = sorted((version, visible) for kind, version, visible in found if kind == "changes")
        return cls(
            np.array([version for version, _ in changes], np.uint64),
            np.array([visible for _, visible in changes], np.float64),
            max((visible for kind, _, visible in found if kind == "history"), default=0.0),
        )

    def latencies(self, changes: Changes, since_ms: float, until_ms: float) -> Numbers:
        """Of the changes that were committed in ``[since, until)`` and that the mirror has, in milliseconds."""
        wanted = (changes.committed_ms >= since_ms) & (changes.committed_ms < until_ms)
        places = np.searchsorted(self.epochs, changes.epochs[wanted])
        there = places < len(self.epochs)
        made: Numbers = self.visible_ms[places[there]] - changes.committed_ms[wanted][there]
        return made


def _commits(log: Path) -> Iterator[tuple[str, int, float]]:
    """What each commit brought: its kind, up to which epoch or plan, and when it could be seen."""
    for path in log.glob("*.json"):
        visible = path.stat().st_mtime_ns / 1e6
        for line in path.read_text().splitlines():
            told = json.loads(line).get("txn")
            if told is not None:
                yield told["appId"].rpartition("/")[2], int(told["version"]), visible


def percentile(values: Numbers, share: float) -> float:
    return round(float(np.percentile(values, share)), 1) if len(values) else 0.0
