"""A process under test: a query that has its history from kept tables, delivered to Delta tables without Spark.

``python kept_query.py FOLDER``: the store is ``FOLDER/store``, the kept tables are in ``FOLDER/tables``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.here import Here

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.sinks.delta import DeltaSink

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
    with DeliveryLoop(Delivery(options, DeltaSink(str(folder / "lake"))), Here()) as loop:
        while loop.plan(1.2) or not loop.planner.is_history_done():
            if loop.plan(0):
                loop.deliver()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
