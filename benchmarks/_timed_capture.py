"""A capture as ``headwater capture`` runs it, timed from the opening of the stream to the seal with the last change.

It starts at a position from before the changes. Nothing is acknowledged at the source, so that it can be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from _harness import Speed, scratch
from headwater.capture import Capture
from headwater.capture.statistics import CaptureStatistics
from headwater.sources.events import ChangeStream
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable

Begun = tuple[CdcOffset, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Captured:
    """:ivar seconds: from the opening of the stream to the seal with the last change.
    :ivar seals: seconds after the opening, and how many rows had been written to the log.
    """

    seconds: float
    seals: Sequence[tuple[float, int]]

    def speed(self, changes: int) -> Speed:
        """Changes per second between the first and the last seal.

        A seal is seen a little late, and with it rows of the next epoch. Those of the first seal are left out, so the
        rate is never too high.
        """
        rows = [rows for _, rows in self.seals]
        share = changes / rows[-1]
        added = [0, *(int((after - before) * share) for before, after in pairwise(rows))]
        return Speed.of_batches(0.0, [(moment, count) for (moment, _), count in zip(self.seals, added, strict=True)])


class _Watched:
    """A source that starts at a given position and records when changes became durable, up to the position *end*."""

    statistics: CaptureStatistics

    def __init__(self, source: Any, begun: Begun, end: CdcOffset) -> None:
        self._source, self._begun, self._end = source, begun, end
        self._started = 0.0
        self.seals: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return self._begun[1]

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> Begun:
        return self._begun

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        self._started = time.perf_counter()
        stream: Any = self._source.open(tables, start, identity)

        def acknowledge(position: CdcOffset) -> None:
            if not self.ended.is_set():
                if self.statistics.rows:
                    self.seals.append((time.perf_counter() - self._started, self.statistics.rows))
                if position >= self._end:
                    self.ended.set()

        stream.acknowledge = acknowledge
        return stream  # type: ignore[no-any-return]


def timed_capture(
    dsn: str, table: str, begun: Begun, end: CdcOffset, changes: int | None = None, **options: Any
) -> Captured:
    """Capture the changes of *table* from *begun* to *end*. :param changes: how many there must be."""
    with scratch() as folder:
        source = _Watched(open_source(dsn, spill=folder / "spill", **options), begun, end)
        running = Capture(source, folder / "store", [table])
        source.statistics = running.statistics

        def stop_at_end() -> None:
            source.ended.wait(300)
            running.stop()

        watcher = threading.Thread(target=stop_at_end, daemon=True)
        watcher.start()
        running.run()
        watcher.join()
        assert changes in (None, running.statistics.rows), (running.statistics, changes)
    assert source.ended.is_set(), "the capture did not reach the end"
    return Captured(source.seals[-1][0], source.seals)
