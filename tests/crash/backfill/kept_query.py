"""A process under test: a query that has its history from kept tables, delivered to Delta tables without Spark.

``python kept_query.py FOLDER``: the store is ``FOLDER/store``, the kept tables are in ``FOLDER/tables``. What it has
delivered is in ``FOLDER/checkpoint.json``, as Spark keeps it: a batch is written down before it is read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headwater.backfill.offset import QueryOffset
from headwater.backfill.query import QueryOptions
from headwater.sinks.delta import DeltaSink
from headwater.spark.claim_check import ClaimDelivery, ClaimReader, ClaimWriter

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


def run(folder: Path, table: str) -> None:
    """Until its history, and the changes so far, are delivered."""
    options = QueryOptions(
        store=str(folder / "store"),
        source=NOWHERE,
        query="later",
        tables=(table,),
        kept=str(folder / "tables"),
        origin="tables",
        keyed=True,
        split_rows=300,
        interval_seconds=0.0001,
    )
    delivery = ClaimDelivery(options, DeltaSink(str(folder / "lake")), str(folder / "stop"))
    reader, writer = ClaimReader(delivery), ClaimWriter(delivery)
    kept = folder / "checkpoint.json"
    logged, done = json.loads(kept.read_text()) if kept.exists() else (None, None)
    while True:
        start = done or reader.initialOffset()
        end = logged if logged not in (None, start) else reader._planner.advance(_of(start), timeout=1.2).to_json()
        if end == start:
            if reader._planner.is_history_done():
                break
            continue
        logged = end
        kept.write_text(json.dumps([logged, done]))
        messages = [writer.write(reader.read(partition)) for partition in reader.partitions(start, end)]
        writer.commit(list(messages), 0)
        done = end
        kept.write_text(json.dumps([logged, done]))
    reader.stop()


def _of(offset: dict[str, int]) -> QueryOffset:
    return QueryOffset.from_json(offset)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
