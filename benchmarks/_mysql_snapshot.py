"""A table of MariaDB through Spark to nowhere, beside two ``mariadb --quick --batch`` and Spark's JDBC reader.

All read the same ten columns; by default ours adds four, which is measured beside.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _harness import Figure, best_of, progress, scratch
from _servers import MariaDbServer
from headwater.spark.session import session

JDBC = Path(__file__).parents[1] / "scripts" / "install_jdbc.sh"
SETTINGS = {
    "innodb-buffer-pool-size": "1G",
    "innodb-log-file-size": "512M",
    "log-bin": "binlog",
    "server-id": "1",
    "binlog-format": "ROW",
}
_COLUMNS = """
    id BIGINT PRIMARY KEY, quantity INT, price DECIMAL(18,4), customer VARCHAR(100), note TEXT, created DATETIME(6),
    changed TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), details JSON, open BOOLEAN, token CHAR(36)
"""
_ROW = """
    seq, seq % 1000, seq * 1.2345, CONCAT('customer ', seq % 977), CONCAT('a note of usual length for row ', seq),
    TIMESTAMP'2026-01-01 00:00:00' + INTERVAL seq * 1.234567 SECOND, TIMESTAMP'2026-02-02 02:02:02.020202',
    JSON_OBJECT('kind', seq % 7, 'tags', 'a b', 'text', CONCAT('hello ', seq)), seq % 3 > 0, UUID()
"""


class Bench:
    """A table of ten columns, and the ways to read it."""

    def __init__(self, server: MariaDbServer, spark: Any, rows: int) -> None:
        self.server, self.spark, self.rows = server, spark, rows
        server.execute(
            "CREATE DATABASE bench",
            f"CREATE TABLE bench.orders ({_COLUMNS}) CHARACTER SET utf8mb4",
            "SET SESSION sql_log_bin = 0",
            f"INSERT INTO bench.orders SELECT {_ROW} FROM bench.seq_1_to_{rows}",
            "ANALYZE TABLE bench.orders",
        )

    def client(self) -> None:
        """Two clients side by side, each half of the keys."""
        middle = self.rows // 2
        running = [self._client(f"id <= {middle}"), self._client(f"id > {middle}")]
        if any(process.wait() for process in running):
            raise RuntimeError("mariadb ended with an error")

    def _client(self, condition: str) -> subprocess.Popen[bytes]:
        server = self.server
        command = [
            *(str(server._root / "usr/bin/mariadb"), "--no-defaults", "-h127.0.0.1", f"-P{server.port}"),
            *("-uheadwater", f"-p{server.password}", "--quick", "--batch", "-e"),
            f"SELECT * FROM bench.orders WHERE {condition}",
        ]
        return subprocess.Popen(command, env=server._environment, stdout=subprocess.DEVNULL)

    def typed(self) -> None:
        """Our data source, a batch of the table's own columns, to nowhere."""
        self._headwater().option("columns", "*").load().write.format("noop").mode("overwrite").save()

    def typed_with_ours(self) -> None:
        """The same with the columns that we add."""
        self._headwater().load().write.format("noop").mode("overwrite").save()

    def _headwater(self) -> Any:
        dsn = self.server.dsn.replace("mysql://", "mariadb://")
        return self.spark.read.format("headwater").option("source", dsn).option("table", "bench.orders")

    def jdbc(self) -> None:
        """Spark's own reader, two partitions, to nowhere."""
        options = {
            "url": f"jdbc:mysql://127.0.0.1:{self.server.port}/bench?permitMysqlScheme=1&useBulkStmts=false",
            "user": "headwater",
            "password": self.server.password,
            "driver": "org.mariadb.jdbc.Driver",
            "dbtable": "orders",
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(self.rows),
            "numPartitions": "2",
            "fetchsize": "10000",
        }
        rows = self.spark.read.format("jdbc").options(**options).load()
        rows.write.format("noop").mode("overwrite").save()

    def warm_up(self) -> None:
        """Read once each way, so that nobody pays for the first time; and all rows are there."""
        found = self._headwater().load().count()
        if found != self.rows:
            raise RuntimeError(f"{found} rows were read, not {self.rows}.")
        self.typed()
        self.jdbc()
        self.client()


def measure_snapshot(quick: bool) -> list[Figure]:
    rows, turns = (1_000_000, 1) if quick else (2_500_000, 3)
    with (
        progress("snapshot of a real MariaDB"),
        scratch() as folder,
        MariaDbServer(SETTINGS) as server,
        _spark_session(folder) as spark,
    ):
        bench = Bench(server, spark, rows)
        bench.warm_up()
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(turns):
            seconds["client"].append(best_of(1, bench.client))
            seconds["typed with ours"].append(best_of(1, bench.typed_with_ours))
            seconds["typed"].append(best_of(1, bench.typed))
            seconds["jdbc"].append(best_of(1, bench.jdbc))
    rate = {name: rows / min(taken) for name, taken in seconds.items()}
    name = "snapshot of MariaDB, typed, to noop"
    return [
        Figure(f"{name} / two mariadb --quick --batch", rate["typed"], rate["client"], 0.6, "higher", "rows/s"),
        Figure("the same / Spark's JDBC reader to noop", rate["typed"], rate["jdbc"], 1.0, "higher", "rows/s"),
        Figure(
            "the same with the columns that we add / Spark's JDBC reader, which has not got them",
            rate["typed with ours"],
            rate["jdbc"],
            None,
            "higher",
            "rows/s",
        ),
    ]


@contextmanager
def _spark_session(folder: Path) -> Iterator[Any]:
    jar = subprocess.run(["sh", str(JDBC), "mariadb"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    config = {
        "spark.jars": jar,
        "spark.driver.memory": "2g",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = session("local[2]", checkpoints=folder, config=config)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
