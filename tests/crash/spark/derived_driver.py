"""A driver that derives a table until it is told to end, or is killed by a failpoint on the way.

Arguments: the store, the folder of the kept tables, that of the lake, and ``end`` to end once nothing is left to do.
What it does is told on stdout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deriving import Deriving
from tests.spark.test_derive import totals
from tests.spark.test_kept_tables import LEFT

from headwater.derive.derivation import Derivation
from headwater.sinks.open import open_sink
from headwater.spark.session import session


def main() -> None:
    store, folder, lake, upto = sys.argv[1:]
    spark = session("local[2]", app_name="derived", checkpoints=Path(lake).parent)
    sink = open_sink("delta", path=lake)
    derivation = Derivation.of("totals", totals, [LEFT], ["name"])
    runner = Deriving(store, folder, derivation, totals, sink, spark)
    idle = 0
    while True:
        before = runner.epoch
        delivered = runner.step()
        print("step", before, runner.epoch, delivered, flush=True)
        idle = 0 if delivered else idle + 1
        if idle > 1 and upto == "end":
            break
    runner.close()
    spark.stop()


if __name__ == "__main__":
    main()
