"""A derived table whose driver is killed in the middle of a step, its Java with it: it goes on, and nothing is lost.

One step is killed; all of them with ``make soak``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.servers.postgres import Database
from tests.spark.conftest import newest_postgres, postgres_servers
from tests.spark.keeper import Keeper
from tests.spark.test_derive import of_totals
from tests.spark.test_kept_tables import LEFT, RIGHT, Transfers, fill

__all__ = ["newest_postgres", "postgres_servers"]

pytestmark = pytest.mark.crash

STEPS = (
    "derive.after_stage@1",  # the first result is staged, nothing of it committed
    "derive.after_deliver@2",  # changes are committed, and nobody wrote that down
    "derive.before_stage@1",
    "delivery.after_pending@1",
    "delivery.before_committed@1",
    "derive.before_save@1",
    "derive.after_save@1",
    "versioned.after_pin@1",
)
KILLED = STEPS if os.environ.get("HEADWATER_SOAK") else STEPS[1:2]


@pytest.fixture
def keeper(newest_postgres: Database, tmp_path: Path) -> Iterator[Keeper]:
    newest_postgres.execute(
        f"CREATE TABLE {LEFT} (id int PRIMARY KEY, amount bigint, name text)",
        f"CREATE TABLE {RIGHT} (id int PRIMARY KEY, amount bigint, name text)",
    )
    made = Keeper(newest_postgres, tmp_path, [LEFT, RIGHT])
    yield made
    made.close()


def drive(keeper: Keeper, lake: Path, failpoint: str | None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]))
    if failpoint is not None:
        name, _, count = failpoint.partition("@")
        environment["HEADWATER_FAILPOINTS"] = f"{name}=kill@{count}"
    command = [sys.executable, "-m", "tests.crash.spark.derived_driver", keeper.store, keeper.folder, str(lake)]
    return subprocess.run(
        [*command, "on" if failpoint else "end"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.soak
@pytest.mark.timeout(400 + 60 * len(KILLED))
def test_a_driver_that_is_killed_goes_on_from_where_it_was(
    keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    writer = Transfers(newest_postgres)
    keeper.fold_on()
    lake = tmp_path / "lake"
    try:
        for failpoint in KILLED:
            done = drive(keeper, lake, failpoint)
            assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    finally:
        writer.stop()
    epoch = keeper.catch_up()
    done = drive(keeper, lake, None)
    assert done.returncode == 0, done.stderr[-2000:]
    table = DeltaTable(str(lake / "derived.totals")).to_pyarrow_table()
    found = sorted(tuple(row.values()) for row in table.to_pylist())
    assert found == of_totals(keeper.model(LEFT, epoch), [])
    steps = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert int(steps[0][1]) > 0, "the first result was not made again"
