"""A capture as ``headwater capture`` runs it, timed from the opening of the stream to the seal with the last change.

It begins at a place from before the work. Nothing is acknowledged at the source, so that it can be done again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from _harness import scratch
from headwater.capture import Capture
from headwater.sources.events import ChangeStream
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable

Begun = tuple[CdcOffset, Mapping[str, Any]]


class _Watched:
    """A source that begins where it is told, and tells when the changes up to *end* were durable."""

    def __init__(self, source: Any, begun: Begun, end: CdcOffset) -> None:
        self._source, self._begun, self._end = source, begun, end
        self._started = self.seconds = 0.0
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
            if position >= self._end and not self.ended.is_set():
                self.seconds = time.perf_counter() - self._started
                self.ended.set()

        stream.acknowledge = acknowledge
        return stream  # type: ignore[no-any-return]


def timed_capture(
    dsn: str, table: str, begun: Begun, end: CdcOffset, changes: int | None = None, **options: Any
) -> float:
    """Seconds until the changes of *table* from *begun* to *end* are durable. :param changes: how many must come."""
    with scratch() as place:
        source = _Watched(open_source(dsn, spill=place / "spill", **options), begun, end)
        running = Capture(source, place / "store", [table])

        def end_it() -> None:
            source.ended.wait(300)
            running.stop()

        watcher = threading.Thread(target=end_it, daemon=True)
        watcher.start()
        running.run()
        watcher.join()
        assert changes in (None, running.statistics.rows), (running.statistics, changes)
    assert source.seconds, "the capture did not come to the end"
    return source.seconds
