"""A process that consumes a Delta table into a Delta mirror as a Spark query would, without Spark; it may be killed.

Arguments: the table, the state, the mirror, the file that stands for Spark's checkpoint. It ends when nothing is left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headwater.backfill.offset import QueryOffset
from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamOptions
from headwater.backfill.snapshot.consume_upstream.planner import UpstreamPlanner
from headwater.backfill.snapshot.consume_upstream.query import UpstreamQuery
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Token
from headwater.sources.table import SourceTable
from headwater.spark.upstream_delivery import UpstreamDelivery, stage_unit


def keep(path: Path, value: dict[str, object]) -> None:
    """As Spark's checkpoint: whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def main(lake: str, state: str, mirror: str, checkpoint: Path) -> None:
    sink = open_sink("delta", path=mirror, mode="mirror")
    query = UpstreamQuery(DeltaUpstream(lake, ("id",)), state, "copy", options=UpstreamOptions(batch_rows=150))

    def recover(generation: int, backfill: str, table: SourceTable) -> None:
        with Coordinator(state, "copy", generation) as coordinator:
            coordinator.recover(sink, backfill, [table])

    planner = UpstreamPlanner(query, recover=recover, takeover=True)
    known = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    start = QueryOffset.from_json(known["done"]) if "done" in known else planner.initial()
    end = QueryOffset.from_json(known["begun"]) if "begun" in known else None
    with Coordinator(state, "copy", planner.generation) as coordinator:
        while True:
            end = end or planner.advance(start)
            if end == start:
                break
            keep(checkpoint, {"done": start.to_json(), "begun": end.to_json()})
            token = Token("copy", planner.backfill_id, start.epoch, end.epoch, end.plan, generation=planner.generation)
            units = planner.units(start, end)
            delivery = UpstreamDelivery(query, sink)
            coordinator.deliver(sink, [one for unit in units for one in stage_unit(delivery, unit, token)])
            keep(checkpoint, {"done": end.to_json()})
            start, end = end, None
    planner.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
