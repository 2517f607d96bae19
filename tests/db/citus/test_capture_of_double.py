"""Capture over a double of a Citus cluster: plain Postgres servers with a catalog filled by hand, not Citus itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.citus.running import ClusterCapture, running
from tests.servers.citus_double import CitusDouble

from headwater.errors import InputError
from headwater.sources.errors import SourceMisconfigured, UnsupportedTable

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


def key_on(double: CitusDouble, group: int, name: str = "acc") -> int:
    return next(key for key in range(1000) if double.owner(name, key) == group)


def test_a_transaction_of_a_node_is_whole_and_its_commits_stay_in_order(double: CitusDouble, tmp_path: Path) -> None:
    """One transaction over two nodes is one commit on each: both come, and no order between them is claimed."""
    double.distribute("acc", COLUMNS)
    one, two = key_on(double, 1), key_on(double, 2)
    with running(double, tmp_path, "acc") as capture:
        for number in range(5):
            with double.connect(1) as first, double.connect(2) as second:
                first.execute("BEGIN")
                second.execute("BEGIN")
                for session, key in ((first, one), (second, two)):
                    session.execute("DELETE FROM acc WHERE id = %s", [key])
                    session.execute("INSERT INTO acc VALUES (%s, %s, 1)", [key, f"t{number}"])
                    session.execute("UPDATE acc SET amount = 2 WHERE id = %s", [key])
                second.execute("COMMIT")
                first.execute("COMMIT")
        capture.assert_equal("acc")
        rows = capture.rows("public.acc")
        for key in (one, two):
            mine = [row for row in rows if row["id"] == key and row["v"] is not None]
            assert [row["v"] for row in mine if row["_op"] == 1] == [f"t{number}" for number in range(5)]
            commits: dict[bytes, set[int]] = {}
            for row in mine:
                commits.setdefault(row["_position"][:8], set()).add(row["_epoch"])
            assert all(len(epochs) == 1 for epochs in commits.values())


def test_columns_that_change_on_one_node_before_the_others_lose_no_value(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    one, two = key_on(double, 1), key_on(double, 2)
    with running(double, tmp_path, "acc") as capture:
        double.execute(1, f"INSERT INTO acc VALUES ({one}, 'a', 1)")
        double.execute(2, f"INSERT INTO acc VALUES ({two}, 'a', 1)")
        capture.assert_equal("acc")
        for statement in (
            "ALTER TABLE acc ADD COLUMN w text DEFAULT 'new'",
            "ALTER TABLE acc RENAME COLUMN v TO u",
            "ALTER TABLE acc ALTER COLUMN amount TYPE numeric(20,2)",
        ):
            double.execute(0, statement)
            double.execute(1, statement, f"UPDATE acc SET amount = amount + 1 WHERE id = {one}")
            double.execute(2, f"UPDATE acc SET amount = amount + 1 WHERE id = {two}")  # behind still
            capture.catch_up()
            double.execute(2, statement, f"UPDATE acc SET amount = amount + 1 WHERE id = {two}")
            capture.catch_up()
        capture.assert_equal("acc")
        assert [event.kind for event in capture.events("public.acc")] == ["schema"] * 3
        statement = "ALTER TABLE acc DROP COLUMN w"
        double.everywhere(statement)
        double.execute(2, f"UPDATE acc SET amount = amount + 1 WHERE id = {two}")
        capture.catch_up()
        assert capture.events("public.acc")[-1].detail["dropped"] == ["w"]
    with running(double, tmp_path) as capture:
        double.execute(1, f"UPDATE acc SET u = 'again' WHERE id = {one}")
        capture.catch_up()
        found = {row["id"]: row["u"] for row in capture.replayed("public.acc").to_pylist()}
        assert found == {one: "again", two: "a"}


def test_columns_that_one_node_told_before_a_restart_lose_no_value_of_one_that_is_behind(
    double: CitusDouble, tmp_path: Path
) -> None:
    double.distribute("acc", "id bigint, v text, amount numeric(10,0)")
    one, two = key_on(double, 1), key_on(double, 2)
    statements = ("ALTER TABLE acc RENAME COLUMN v TO u", "ALTER TABLE acc ALTER COLUMN amount TYPE numeric(20,0)")
    with running(double, tmp_path, "acc") as capture:
        double.execute(0, *statements)
        double.execute(1, *statements, f"INSERT INTO acc VALUES ({one}, 'a', {2**40})")
        capture.catch_up()
    double.execute(2, f"INSERT INTO acc VALUES ({two}, 'b', 7)", *statements, f"UPDATE acc SET amount = {2**41}")
    with running(double, tmp_path) as capture:
        capture.assert_equal("acc")
        told = [(row["u"], row["amount"]) for row in capture.rows("public.acc") if row["id"] == two]
        assert told[0] == ("b", 7)
        assert not capture.capture.statistics.stopped_tables


@pytest.mark.soak
def test_a_table_is_added_when_transactions_that_hold_its_shards_have_ended(
    double: CitusDouble, tmp_path: Path
) -> None:
    """One that stays prepared on a node, for example: it has written to a shard, which the table does not show."""
    double.distribute("acc", COLUMNS)
    double.everywhere("CREATE TABLE late (id bigint PRIMARY KEY, v text)")
    double.execute(1, "CREATE TABLE late_7 (LIKE late INCLUDING ALL)")
    double.execute(
        0,
        "INSERT INTO pg_dist_partition VALUES ('late', 'h', 's')",
        "INSERT INTO pg_dist_shard VALUES ('late', 7)",
        "INSERT INTO pg_dist_placement VALUES (999, 7, 1)",
    )
    with running(double, tmp_path, "acc"):
        pass
    double.execute(1, "BEGIN", "INSERT INTO late_7 VALUES (1, 'in doubt')", "PREPARE TRANSACTION 'doubt'")
    capture = ClusterCapture(double, tmp_path, "acc", "late")
    capture.start()
    try:
        capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        assert "of prepared transactions" in capture.capture.statistics.last_error
        double.execute(1, "COMMIT PREPARED 'doubt'")
        capture.wait_for(lambda: "public.late" in capture.tables())
    finally:
        capture.stop()


def test_a_table_that_cannot_be_told_stops_alone_and_says_what_to_do(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.distribute("other", COLUMNS)
    double.reference("ref", COLUMNS)
    fill(double, "acc", 0, 4)
    with running(double, tmp_path, "acc", "other", "ref") as capture:
        double.execute(1, "TRUNCATE acc")
        reason = capture.wait_until_stopped("public.acc")
        assert reason == "It was truncated, node by node. Run: headwater resnapshot public.acc"
        double.execute(0, "INSERT INTO ref VALUES (1, 'one', 1)", "TRUNCATE ref")
        assert capture.wait_until_stopped("public.ref").endswith("Run: headwater resnapshot public.ref")
        fill(double, "other", 0, 6)
        capture.assert_equal("other")


def test_a_reference_table_that_is_truncated_from_a_worker_stops(double: CitusDouble, tmp_path: Path) -> None:
    """That worker tells it of the table, which has no rows there; of the coordinator's copy nothing is told."""
    double.reference("ref", "id bigint, v text")
    double.distribute("acc", COLUMNS)
    for group in (1, 2):
        double.execute(
            group, "CREATE TABLE ref (id bigint PRIMARY KEY, v text)", "CREATE PUBLICATION headwater FOR TABLE ref"
        )
        double.execute(
            group, "ALTER PUBLICATION headwater SET (publish_via_partition_root, publish_generated_columns = stored)"
        )
    with running(double, tmp_path, "acc", "ref") as capture:
        double.execute(0, "INSERT INTO ref VALUES (1, 'one')")
        double.execute(1, "INSERT INTO ref VALUES (7, 'no node of a cluster tells this')")
        fill(double, "acc", 0, 4)
        capture.assert_equal("acc", "ref")
        (copy,) = double.execute(
            0, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'ref'::regclass"
        )
        double.execute(0, f"TRUNCATE {copy[0]}")
        double.execute(1, "TRUNCATE ref")
        assert capture.wait_until_stopped("public.ref").endswith("Run: headwater resnapshot public.ref")
        fill(double, "acc", 4, 8)
        capture.assert_equal("acc")


@pytest.mark.soak
def test_a_table_is_added_while_the_nodes_are_followed(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.distribute("late", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 0, 4)
        capture.assert_equal("acc")
    with running(double, tmp_path, "acc", "late") as capture:
        fill(double, "late", 0, 8)
        fill(double, "acc", 4, 8)
        capture.assert_equal("acc", "late")
        capture.assert_once("public.acc", "public.late")


def test_what_is_no_coordinator_and_what_would_be_told_twice_is_refused(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    shard, owner = next(iter(double.tables["acc"].shards.items()))
    double.execute(0, f"INSERT INTO pg_dist_placement VALUES (999, {shard}, {3 - owner})")
    refused = ClusterCapture(double, tmp_path / "copies", "acc").fails_to_start()
    assert isinstance(refused, UnsupportedTable)
    assert "shard_replication_factor" in str(refused)
    double.execute(0, "UPDATE pg_dist_local_group SET groupid = 7")
    refused = ClusterCapture(double, tmp_path / "worker", "acc").fails_to_start()
    assert isinstance(refused, SourceMisconfigured | InputError)
    assert "coordinator" in str(refused)
