"""Capture of a binlog: from the server's stream to the durable log, as ``headwater capture`` does it."""

from __future__ import annotations

from _harness import scratch
from _servers import MariaDbServer
from _timed_capture import Begun, timed_capture
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source


def begin(server: MariaDbServer) -> Begun:
    """Where a capture of ``bench.orders`` would begin now."""
    with scratch() as place:
        source = open_source(f"{server.dsn}bench", spill=place)
        begun = source.begin(source.tables(["bench.orders"]), resumed=False)
        source.close()
    return begun


def capture(server: MariaDbServer, begun: Begun, end: CdcOffset) -> float:
    """Seconds that a capture takes for all changes between the two positions."""
    return timed_capture(f"{server.dsn}bench", "bench.orders", begun, end)
