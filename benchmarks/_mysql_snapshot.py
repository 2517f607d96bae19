"""A table of MariaDB through Spark to nowhere, beside two ``mariadb --quick --batch`` and Spark's JDBC reader.

All read the same ten columns; by default ours adds four, which is measured separately. Each way reads a table of few
rows and a table of many rows. The few rows show the start; the rate is that of the rows that the large table has more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from _harness import Figure, Speed, interleaved, progress, scratch
from _servers import MariaDbServer
from _spark import spark_session, to_nowhere
from _tools import Tool, mariadb, side_by_side

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


FEW_ROWS = 10_000


class Bench:
    """A table of ten columns, and the ways to read it."""

    def __init__(self, server: MariaDbServer, spark: Any, name: str, rows: int) -> None:
        self.server, self.spark, self.name, self.rows = server, spark, name, rows
        server.execute(
            "CREATE DATABASE IF NOT EXISTS bench",
            f"CREATE TABLE bench.{name} ({_COLUMNS}) CHARACTER SET utf8mb4",
            "SET SESSION sql_log_bin = 0",
            f"INSERT INTO bench.{name} SELECT {_ROW} FROM bench.seq_1_to_{rows}",
            f"ANALYZE TABLE bench.{name}",
        )

    def client(self) -> None:
        """Two clients side by side, each with half of the keys."""
        middle = self.rows // 2
        side_by_side(self._client(f"id <= {middle}"), self._client(f"id > {middle}"))

    def _client(self, condition: str) -> Tool:
        return mariadb(self.server, f"SELECT * FROM bench.{self.name} WHERE {condition}", "--quick", "--batch")

    def typed(self) -> None:
        """Our data source with the table's own columns."""
        to_nowhere(self._headwater().option("columns", "*").load())

    def typed_with_ours(self) -> None:
        """The same with the columns that we add."""
        to_nowhere(self._headwater().load())

    def _headwater(self) -> Any:
        dsn = self.server.dsn.replace("mysql://", "mariadb://")
        return self.spark.read.format("headwater").option("source", dsn).option("table", f"bench.{self.name}")

    def jdbc(self) -> None:
        """Spark's own reader, two partitions."""
        options = {
            "url": f"jdbc:mysql://127.0.0.1:{self.server.port}/bench?permitMysqlScheme=1&useBulkStmts=false",
            "user": "headwater",
            "password": self.server.password,
            "driver": "org.mariadb.jdbc.Driver",
            "dbtable": self.name,
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(self.rows),
            "numPartitions": "2",
            "fetchsize": "10000",
        }
        to_nowhere(self.spark.read.format("jdbc").options(**options).load())

    def warm_up(self) -> None:
        """Read once each way, so that no figure has the cost of the first time.

        :raises RuntimeError: rows are missing.
        """
        count = self._headwater().load().count()
        if count != self.rows:
            raise RuntimeError(f"{count} rows were read, not {self.rows}.")
        self.typed()
        self.jdbc()
        self.client()


WAYS: dict[str, Callable[[Bench], None]] = {
    "client": Bench.client,
    "typed with ours": Bench.typed_with_ours,
    "typed": Bench.typed,
    "jdbc": Bench.jdbc,
}


def measure_snapshot(quick: bool) -> list[Figure]:
    rows, turns = (600_000, 1) if quick else (2_500_000, 3)
    with (
        progress("snapshot of a real MariaDB"),
        scratch() as folder,
        MariaDbServer(SETTINGS) as server,
        spark_session(folder, jdbc="mariadb") as spark,
    ):
        few, many = Bench(server, spark, "few_orders", FEW_ROWS), Bench(server, spark, "orders", rows)
        few.warm_up()
        if not quick:
            many.warm_up()
        of_few = interleaved(3, *(partial(way, few) for way in WAYS.values()))
        of_many = interleaved(turns, *(partial(way, many) for way in WAYS.values()))
    seconds = zip(of_few, of_many, strict=True)
    speed = {
        name: Speed.of_sizes((FEW_ROWS, start), (rows, whole))
        for name, (start, whole) in zip(WAYS, seconds, strict=True)
    }

    def rate(name: str, value: str, bound: str, goal: float | None) -> Figure:
        return Figure(name, speed[value].rate, speed[bound].rate, goal, "higher", "rows/s", turns)

    name, jdbc = "snapshot of MariaDB, typed, to noop", "Spark's JDBC reader"
    return [
        rate(f"{name}, after the start / two mariadb --quick --batch", "typed", "client", 0.6),
        rate(f"{name}, after the start / {jdbc}", "typed", "jdbc", 1.0),
        rate(f"{name}, with the columns that we add / {jdbc} without them", "typed with ours", "jdbc", None),
        Figure(
            f"{name}: start, {FEW_ROWS:,} rows / {jdbc}",
            speed["typed"].start,
            speed["jdbc"].start,
            None,
            "lower",
            "s",
            turns,
        ),
    ]
