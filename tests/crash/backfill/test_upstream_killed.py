"""A query over a Delta table, killed at each durable step of snapshot and change log: the mirror is the table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.test_delta_upstream import Lake, Rows

from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream
from headwater.failpoints import VARIABLE
from headwater.sinks.open import open_sink

DRIVER = Path(__file__).with_name("upstream_driver.py")
POINTS = (
    "query.before_save",
    "query.after_save",
    "upstream.before_hold",
    "upstream.after_hold",
    "delivery.before_pending",
    "delivery.after_pending",
    "delivery.before_committed",
    "delivery.after_committed",
)


class Run:
    """The process, and where everything is."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(folder / "orders", {key: f"v{key}" for key in range(500)})
        self._folder = folder

    def drive(self, failpoint: str = "") -> int:
        words = [self.lake.path, *(str(self._folder / name) for name in ("state", "mirror"))]
        made = subprocess.run(
            [sys.executable, str(DRIVER), *words],
            env=os.environ | {VARIABLE: failpoint, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert made.returncode in (0, -signal.SIGKILL), made.stderr
        return made.returncode

    def mirrored(self) -> Rows:
        upstream = DeltaUpstream(self.lake.path, ("id",))
        table = upstream.table(upstream.newest_epoch())
        sink = open_sink("delta", path=str(self._folder / "mirror"), mode="mirror")
        batches = list(sink.shown(table, ["id", "v"]))
        found = pa.Table.from_batches(batches).to_pydict() if batches else {"id": [], "v": []}
        assert len(set(found["id"])) == len(found["id"])
        return dict(zip(found["id"], found["v"], strict=True))

    def expected(self) -> Rows:
        found = self.lake.delta.to_pyarrow_table().to_pydict()
        return dict(zip(found["id"], found["v"], strict=True))


@pytest.mark.parametrize("point", POINTS if os.environ.get("HEADWATER_SOAK") == "1" else POINTS[5:6])
def test_m1_killed_at_a_durable_step_in_each_phase_the_mirror_is_the_table(tmp_path: Path, point: str) -> None:
    run = Run(tmp_path)
    killed = run.drive(f"{point}=kill@3") != 0
    run.lake.merge({1: "x", 5000: "new"})
    run.lake.delta.delete("id < 100 and id > 50")
    killed |= run.drive(f"{point}=kill@2") != 0
    assert killed, "the failpoint was never reached"
    assert run.drive() == 0
    assert run.mirrored() == run.expected()
