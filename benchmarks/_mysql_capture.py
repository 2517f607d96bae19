"""Capture of a binlog: from the server's stream to the durable log, as ``headwater capture`` does it.

It begins at a position from before the work, and is timed from the opening of the stream to the seal of the epoch that
has the last change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from _harness import scratch
from _servers import MariaDbServer
from headwater.capture import Capture
from headwater.sources.events import ChangeStream
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable

Begun = tuple[CdcOffset, Mapping[str, Any]]


def begin(server: MariaDbServer) -> Begun:
    """Where a capture of ``bench.orders`` would begin now."""
    with scratch() as place:
        source = open_source(f"{server.dsn}bench", spill=place)
        begun = source.begin(source.tables(["bench.orders"]), resumed=False)
        source.close()
    return begun


class _Watched:
    """A source that begins where it is told, and tells when the changes up to *end* were durable."""

    def __init__(self, source: Any, begun: Begun, end: CdcOffset) -> None:
        self._source, self._begun, self._end = source, begun, end
        self._started = self.seconds = 0.0
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

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


def capture(server: MariaDbServer, begun: Begun, end: CdcOffset) -> float:
    """Seconds that a capture takes for all changes between the two positions."""
    with scratch() as place:
        source = _Watched(open_source(f"{server.dsn}bench", spill=place / "spill"), begun, end)
        running = Capture(source, place / "store", ["bench.orders"])

        def end_it() -> None:
            source.ended.wait(300)
            running.stop()

        watcher = threading.Thread(target=end_it, daemon=True)
        watcher.start()
        running.run()
        watcher.join()
    assert source.seconds, "the capture did not come to the end"
    return source.seconds
