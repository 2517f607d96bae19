"""A pipeline on the oldest PySpark that is supported; all other tests run on the newest one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline

from headwater.spark.spark_version import OLDEST

ROWS = 1_000
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


class OldestSparkPipeline(RunningPipeline):
    """Runs on the PySpark in *pyspark*, which is not installed."""

    pyspark: Path

    def _command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command(*arguments)
        inherited = {name: value for name, value in environment.items() if name != "SPARK_HOME"}
        return command, inherited | {"PYTHONPATH": str(self.pyspark)}


@pytest.fixture(scope="module")
def oldest_pyspark() -> Path:
    script = Path(__file__).parents[3] / "scripts/install_oldest_spark.sh"
    match = re.search(r"^VERSION=(.*)$", script.read_text(), re.MULTILINE)
    assert match is not None
    assert match[1].startswith(".".join(map(str, OLDEST)) + ".")
    folder = _CACHE / f"pyspark-{match[1]}"
    if not folder.is_dir():
        if os.environ.get("HEADWATER_NO_OLDEST_SPARK"):
            pytest.skip("HEADWATER_NO_OLDEST_SPARK is set.")
        pytest.fail(f"{folder} is missing. Run: sh scripts/install_oldest_spark.sh. Or set HEADWATER_NO_OLDEST_SPARK.")
    return folder


@pytest.fixture
def pipeline(newest_postgres: Database, oldest_pyspark: Path, tmp_path: Path) -> Iterator[OldestSparkPipeline]:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
    )
    pipeline = OldestSparkPipeline(tmp_path, newest_postgres, '["public.orders"]')
    pipeline.pyspark = oldest_pyspark
    yield pipeline
    pipeline.close()


def test_a_mirror_on_the_oldest_spark_is_equal_after_its_driver_was_killed(
    pipeline: OldestSparkPipeline, newest_postgres: Database
) -> None:
    pipeline.start()
    pipeline.wait_until_equal("public.orders")
    assert pipeline.named(b"spark-3.5"), "Java does not run this Spark"
    newest_postgres.execute("UPDATE orders SET name = 'changed' WHERE id % 2 = 0")
    pipeline.kill9()
    newest_postgres.execute("DELETE FROM orders WHERE id % 10 = 0", "INSERT INTO orders VALUES (0, 'new')")
    pipeline.start()
    pipeline.wait_until_equal("public.orders")
    assert pipeline.stop(signal.SIGINT) == 0
