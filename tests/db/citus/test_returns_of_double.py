"""What comes back and what is placed elsewhere, over a double of a Citus cluster: plain Postgres, not Citus."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.citus.running import ClusterCapture, running
from tests.db.citus.writing import fill
from tests.servers.citus_double import CitusDouble, Nodes

from headwater.sources.citus import followed_nodes
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.diagnosis import Finding
from headwater.sources.open import diagnose

COLUMNS = "id bigint, v text, amount numeric(12,2)"


def empty(double: CitusDouble, group: int, to: int) -> None:
    for shard in [shard for shard, owner in double.tables["acc"].shards.items() if owner == group]:
        double.move("acc", shard, to)


def wait_for_nodes(capture: ClusterCapture, *groups: int) -> None:
    def are_followed() -> bool:
        offset = capture.offset()
        return capture.failure is not None or (offset is not None and sorted(offset.nodes) == list(groups))

    capture.wait_for(are_followed)
    assert capture.failure is None


def test_a_server_that_was_removed_and_added_again_is_followed_and_tells_nothing_twice(
    double: CitusDouble, tmp_path: Path
) -> None:
    """First before the capture could retire it; then with a slot that was left over from the first time."""
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 20)
        capture.assert_equal("acc")
    double.execute(1, "SELECT pg_copy_logical_replication_slot('headwater', 'kept')", "UPDATE acc SET v = 'tail'")
    empty(double, 1, 2)
    double.remove_node(1)
    again = double.add_again(1)
    with running(double, tmp_path) as capture:
        wait_for_nodes(capture, 0, 2, again)
        empty(double, 2, again)
        fill(double, "acc", 20, first=20)
        capture.catch_up()
        capture.assert_once("public.acc")
        empty(double, again, 2)
        double.remove_node(again)
        wait_for_nodes(capture, 0, 2)
        capture.wait_for(
            lambda: not double.execute(again, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'headwater'")
        )
        told = len(capture.rows("public.acc"))
    double.execute(again, "SELECT pg_copy_logical_replication_slot('kept', 'headwater')")
    third = double.add_again(again)
    with running(double, tmp_path) as capture:
        wait_for_nodes(capture, 0, 2, third)
        capture.catch_up()
        assert len(capture.rows("public.acc")) == told
        empty(double, 2, third)
        fill(double, "acc", 20, first=40)
        capture.catch_up()
        assert len(capture.rows("public.acc")) == told + 20
        capture.assert_once("public.acc")
        found = {row["id"]: row["v"] for row in capture.replayed("public.acc").to_pylist()}
        assert found == {key: row[1] for key, row in double.rows("acc").items()}


def test_a_slot_on_a_server_that_left_is_dropped_when_it_answers_again(
    double: CitusDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database takes no connection when the capture retires it; the doctor tells of it until the slot is gone."""
    monkeypatch.setattr(followed_nodes, "SLOT_SECONDS", 0.1)
    double.distribute("acc", COLUMNS)
    address = f"127.0.0.1:{double.servers[2].port}"

    def let_in(allowed: bool) -> None:
        with double.servers[2].connect() as admin:
            admin.execute(f"ALTER DATABASE {double.database} ALLOW_CONNECTIONS {allowed}".encode())

    def has_slot() -> bool:
        with double.servers[2].connect() as admin:
            query = "SELECT 1 FROM pg_replication_slots WHERE database = %s"
            return bool(admin.execute(query, [double.database]).fetchall())

    def is_noted() -> list[str]:
        offset = capture.offset()
        return [] if offset is None else list(offset.slots.values())

    def told(position: CitusOffset | None) -> list[Finding]:
        found = diagnose(double.dsn, [], slot="headwater", publication="headwater", told=position).findings
        return [one for one in found if one.check == "slot" and address in one.text]

    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 20)
        empty(double, 2, 1)
        capture.catch_up()
        let_in(False)
        double.remove_node(2)
        wait_for_nodes(capture, 0, 1)
        assert is_noted() == [address]
        assert has_slot()
        (finding,) = told(capture.offset())
        assert "SELECT pg_drop_replication_slot('headwater');" in str(finding.fix)
        let_in(True)
        capture.wait_for(lambda: not has_slot())
        double.execute(1, "UPDATE acc SET v = 'later'")
        capture.wait_for(lambda: not is_noted())
        assert told(capture.offset()) == []


def test_a_table_whose_copies_are_told_by_nobody_or_twice_stops(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", COLUMNS)
    double.distribute("other", COLUMNS)
    with running(double, tmp_path, "acc", "ref", "other") as capture:
        shard = next(shard for shard, owner in double.tables["acc"].shards.items() if owner == 1)
        double.execute(
            0,
            "DELETE FROM pg_dist_placement p USING pg_dist_shard s"
            " WHERE s.shardid = p.shardid AND s.logicalrelid = 'ref'::regclass AND p.groupid = 0",
            f"INSERT INTO pg_dist_placement VALUES (999, {shard}, 2)",
        )
        stopped = capture.capture.statistics.stopped_tables
        capture.wait_for(lambda: len(stopped) == 2)
        assert "the coordinator has no copy" in stopped["public.ref"].lower()
        assert "its shards have copies" in stopped["public.acc"].lower()
        assert all(reason.endswith(f"headwater resnapshot {name}") for name, reason in stopped.items())
        fill(double, "other", 5)
        capture.assert_equal("other")


@pytest.mark.soak
def test_a_node_with_a_long_transaction_joins_later_and_the_others_go_on(
    double: CitusDouble, nodes: Nodes, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        with nodes.server(3).connect() as session:
            session.execute("BEGIN")
            session.execute("CREATE TABLE held ()")
            joined = double.add_node(nodes.server(3))
            waiting = "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'headwater_joining'"
            capture.wait_for(lambda: double.execute(joined, waiting))
            for first in range(0, 30, 10):
                fill(double, "acc", 10, first=first)
                capture.wait_for(lambda rows=first + 10: len(capture.rows("public.acc")) == rows)
            assert double.execute(joined, waiting)
            session.execute("ROLLBACK")
        wait_for_nodes(capture, 0, 1, 2, joined)
        empty(double, 1, joined)
        fill(double, "acc", 10, first=30)
        capture.catch_up()
        assert len(capture.rows("public.acc")) == 40
        assert capture.capture.statistics.restarts == 0


def test_a_node_that_has_not_its_tables_yet_is_waited_for(double: CitusDouble, nodes: Nodes, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    tables, double.tables = double.tables, {}
    with running(double, tmp_path, "acc") as capture:
        joined = double.add_node(nodes.server(3))
        double.tables = tables
        capture.wait_for(lambda: capture.failure is not None or capture.capture.statistics.restarts > 0)
        assert f"127.0.0.1:{double.servers[joined].port}" in capture.capture.statistics.last_error
        double.execute(joined, f"CREATE TABLE acc ({COLUMNS}, PRIMARY KEY (id)) PARTITION BY HASH (id)")
        wait_for_nodes(capture, 0, 1, 2, joined)
        empty(double, 1, joined)
        fill(double, "acc", 10)
        capture.assert_equal("acc")
