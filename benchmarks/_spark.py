"""The Spark session of benchmarks: two tasks side by side."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from headwater.spark.session import session

_INSTALL_JDBC = Path(__file__).parents[1] / "scripts" / "install_jdbc.sh"


@contextmanager
def spark_session(folder: Path, jdbc: Literal["postgres", "mariadb"] | None = None) -> Iterator[Any]:
    """:param jdbc: the database for which Spark gets a JDBC driver."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    config = {
        "spark.driver.memory": "2g",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if jdbc is not None:
        config["spark.jars"] = _jdbc_driver(jdbc)
    spark = session("local[2]", checkpoints=folder, config=config)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def _jdbc_driver(database: str) -> str:
    command = ["sh", str(_INSTALL_JDBC), database]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def to_nowhere(rows: Any) -> None:
    """Read a DataFrame and throw its rows away."""
    rows.write.format("noop").mode("overwrite").save()
