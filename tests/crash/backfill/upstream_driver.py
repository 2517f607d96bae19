"""A process that consumes a Delta table into a Delta mirror by a delivery loop, without Spark; it may be killed.

Arguments: the table, the state, the mirror. It ends when nothing is left.
"""

from __future__ import annotations

import sys

from tests.here import Here

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream
from headwater.sinks.open import open_sink


def main(lake: str, state: str, mirror: str) -> None:
    query = QueryOptions.over(DeltaUpstream(lake, ("id",)), state, "copy", max_rows=150)
    delivery = Delivery(query, open_sink("delta", path=mirror, mode="mirror"))
    with DeliveryLoop(delivery, Here()) as loop:
        while loop.plan(0.0):
            loop.deliver()


if __name__ == "__main__":
    main(*sys.argv[1:])
