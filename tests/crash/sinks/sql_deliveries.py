"""The batches of :mod:`.deliveries` for sinks in databases, delivered by a process that can be killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from headwater import failpoints
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink

from . import deliveries


def sink_of(kind: str, dsn: str, mode: str) -> Sink:
    return open_sink(kind, dsn=dsn, mode=mode)


def child(kind: str, dsn: str, mode: str, armed: str, generation: int) -> None:
    """Begin as a query does, and deliver every batch, with failpoints armed."""
    failpoints.arm(armed)
    sink = sink_of(kind, dsn, mode)
    sink.abort(deliveries.WIDER, "q", generation)
    for token, table, staged in deliveries.batches(sink, generation):
        sink.commit(table, token, staged)


def count_hits(kind: str, dsn: str, mode: str, hits_file: str) -> None:
    """Deliver, and write down how often each failpoint was passed."""
    hits: Counter[str] = Counter()
    original = failpoints.hit

    def counted(name: str) -> None:
        hits[name] += 1
        original(name)

    failpoints.hit = counted
    child(kind, dsn, mode, "", 1)
    Path(hits_file).write_text(json.dumps(hits))
