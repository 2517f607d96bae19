"""Capture over a double of a Citus cluster: plain Postgres servers with a catalog filled by hand, not Citus itself."""

from __future__ import annotations

from pathlib import Path

from tests.db.citus.running import running
from tests.servers.citus_double import CitusDouble

COLUMNS = "id bigint, v text, amount numeric(12,2)"


def fill(double: CitusDouble, name: str, first: int, last: int) -> None:
    """Rows of a distributed table, each on the node that has its shard."""
    for key in range(first, last):
        double.execute(double.owner(name, key), f"INSERT INTO {name} VALUES ({key}, 'v{key}', {key}.25)")


def test_distributed_reference_and_local_tables_are_captured_once_from_their_nodes(
    double: CitusDouble, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", "id bigint, v text")
    double.execute(0, "CREATE TABLE own (id bigint PRIMARY KEY, v text)")
    with running(double, tmp_path, "acc", "ref", "own") as capture:
        fill(double, "acc", 0, 12)
        double.execute(0, "INSERT INTO ref VALUES (1, 'one'), (2, 'two')", "INSERT INTO own VALUES (1, 'mine')")
        for group in (1, 2):
            double.execute(group, "UPDATE acc SET v = v || '!'", "DELETE FROM acc WHERE id % 5 = 0")
        double.execute(0, "UPDATE ref SET v = 'ONE' WHERE id = 1", "TRUNCATE own", "INSERT INTO own VALUES (2, 'new')")
        capture.assert_equal("acc", "ref", "own")
        capture.assert_once("public.acc", "public.ref", "public.own")
        offset = capture.offset()
        assert offset is not None
        assert sorted(offset.nodes) == [0, 1, 2]
        groups = {int.from_bytes(row["_position"][8:12], "big") for row in capture.rows("public.acc")}
        assert groups == {1, 2}
