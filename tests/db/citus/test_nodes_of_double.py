"""Nodes that join, leave and die, and shards that move, over a double of a Citus cluster: plain Postgres, not Citus."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.citus.running import ClusterCapture, running
from tests.db.citus.writing import Writer, fill
from tests.servers.citus_double import CitusDouble, Nodes, log_ends

from headwater.sources.citus.cluster import NodeMissed
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.errors import SlotLost
from headwater.sources.events import Boundary, Changes
from headwater.sources.open import open_source

COLUMNS = "id bigint, v text, amount numeric(12,2)"


def test_a_shard_that_moves_emits_nothing_twice_and_its_changes_keep_their_order(
    double: CitusDouble, tmp_path: Path
) -> None:
    """Both while the capture runs and while it is away: then old and new changes of a row wait on two nodes."""
    double.distribute("acc", COLUMNS)
    fill(double, "acc", 200)
    with running(double, tmp_path, "acc") as capture, Writer(double, "acc", keys=200) as writer:
        for shard, owner in list(double.tables["acc"].shards.items()):
            with writer.may_write:
                double.move("acc", shard, 3 - owner)
                writer.forget_owners()
            written = writer.writes
            capture.wait_for(lambda before=written: writer.writes > before + 20)
        writer.end()
        for group in (1, 2):
            double.execute(group, "UPDATE acc SET v = v || '.'")
        capture.catch_up()
    places = {
        group: next(
            (shard, double.execute(group, f"SELECT min(id) FROM acc_{shard}")[0][0])
            for shard, owner in double.tables["acc"].shards.items()
            if owner == group
        )
        for group in (1, 2)
    }
    for turn in range(4):  # there and back: no order of whole nodes is right for both rows
        for shard, key in places.values():
            there = double.tables["acc"].shards[shard]
            double.execute(there, f"UPDATE acc SET v = 'turn {turn}' WHERE id = {key}")
            double.move("acc", shard, 3 - there)
    with running(double, tmp_path) as capture:
        capture.catch_up()
        for _, key in places.values():
            told = [row["v"] for row in capture.rows("public.acc") if row["id"] == key]
            assert told[-4:] == [f"turn {turn}" for turn in range(4)]
        capture.assert_once("public.acc")
        found = {row["id"]: row["v"] for row in capture.replayed("public.acc").to_pylist()}
        assert found == {key: row[1] for key, row in double.rows("acc").items()}


def test_what_was_written_before_a_shard_moved_is_merged_many_transactions_at_once(
    double: CitusDouble, tmp_path: Path
) -> None:
    """One at a time, a cluster under load may write more than is told."""
    double.distribute("acc", COLUMNS)
    source = open_source(double.dsn, spill=tmp_path)
    tables = source.tables(["acc"])
    start, identity = source.begin(tables, resumed=False)
    with Writer(double, "acc", keys=200) as writer:
        while writer.writes <= 1000:
            time.sleep(0.01)
    shard, owner = next(iter(double.tables["acc"].shards.items()))
    double.move("acc", shard, 3 - owner)
    ends, told = log_ends(double), []
    stream = source.open(tables, start, identity)
    while isinstance(start, CitusOffset) and any(start.nodes[group].at.lsn < end for group, end in ends.items()):
        for event in stream.poll(1.0, stop_at_boundary=False):
            if isinstance(event, Changes):
                told.append(event.rows)
            elif isinstance(event, Boundary):
                start = event.position
    stream.close()
    source.close()
    rows = pa.Table.from_batches(told)
    times, positions = rows.column("_commit_timestamp").to_pylist(), rows.column("_position").to_pylist()
    assert times == sorted(times)
    assert positions == sorted(set(positions))
    assert len({position[8:12] for position in positions}) == 2  # of both workers
    assert len(told) < writer.writes / 20


def test_a_node_that_joins_is_followed_and_one_that_leaves_is_read_to_its_end(
    double: CitusDouble, nodes: Nodes, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture, Writer(double, "acc", keys=300) as writer:
        joined = double.add_node(nodes.server(3))

        def follows() -> bool:
            offset = capture.offset()
            return capture.failure is not None or (offset is not None and joined in offset.nodes)

        capture.wait_for(follows)
        assert capture.failure is None
        for shard in [shard for shard, owner in double.tables["acc"].shards.items() if owner == 1]:
            with writer.may_write:
                double.move("acc", shard, joined)
                writer.forget_owners()
        with writer.may_write:
            double.remove_node(1)

        def is_retired() -> bool:
            offset = capture.offset()
            return capture.failure is not None or (offset is not None and offset.retired == (1,))

        capture.wait_for(is_retired)
        capture.wait_for(
            lambda: not double.execute(1, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'headwater'")
        )
        written = writer.writes
        capture.wait_for(lambda: writer.writes > written + 20)
        writer.end()
        capture.assert_equal("acc")
        capture.assert_once("public.acc")
    with running(double, tmp_path) as capture:  # what is retired stays so
        capture.assert_equal("acc")
        offset = capture.offset()
        assert offset is not None
        assert sorted(offset.nodes) == [0, 2, joined]


def test_a_node_that_had_shards_before_it_could_be_followed_stops_the_capture(
    double: CitusDouble, nodes: Nodes, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc"):
        pass
    joined = double.add_node(nodes.server(3))
    double.move("acc", next(iter(double.tables["acc"].shards)), joined)
    capture = ClusterCapture(double, tmp_path, "acc")
    for _ in range(2):  # nor is the slot that the first attempt made taken for one from before
        failure = capture.fails_to_start()
        assert isinstance(failure, NodeMissed)
        assert str(nodes.server(3).port) in failure.message
        assert failure.next_step == "Run: headwater resnapshot"


def test_a_lost_slot_on_one_node_stops_the_capture_with_the_command(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 10)
        capture.assert_equal("acc")
    double.execute(2, "SELECT pg_drop_replication_slot('headwater')")
    failure = ClusterCapture(double, tmp_path, "acc").fails_to_start()
    assert isinstance(failure, SlotLost)
    assert f"127.0.0.1:{double.servers[2].port}" in failure.message
    assert failure.next_step == "Run: headwater resnapshot"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_node_that_is_killed_loses_and_doubles_nothing(nodes: Nodes, tmp_path: Path, victim: int) -> None:
    servers = [nodes.server(place) for place in range(3)]
    with CitusDouble(servers, nodes.name()) as double:
        double.distribute("acc", COLUMNS)
        with running(double, tmp_path, "acc") as capture, Writer(double, "acc", keys=300) as writer:
            capture.wait_for(lambda: writer.writes > 50)
            double.servers[victim].kill9()
            double.servers[victim].start()
            written = writer.writes
            capture.wait_for(lambda: writer.writes > written + 50)
            writer.end()
            capture.assert_equal("acc")
            capture.assert_once("public.acc")


@pytest.mark.soak
def test_a_node_with_another_address_is_followed_there(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc") as capture:
        fill(double, "acc", 20)
        capture.assert_equal("acc")
        double.execute(0, "UPDATE pg_dist_node SET nodename = 'localhost' WHERE groupid = 1")
        fill(double, "acc", 20, first=20)
        capture.assert_equal("acc")

        def is_there() -> bool:
            offset = capture.offset()
            return offset is not None and offset.nodes[1].address == f"localhost:{double.servers[1].port}"

        capture.wait_for(is_there)
        fill(double, "acc", 20, first=40)
        capture.assert_equal("acc")
        capture.assert_once("public.acc")


@pytest.mark.soak
def test_a_node_that_was_removed_and_is_gone_stops_the_capture(
    double: CitusDouble, nodes: Nodes, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with nodes.start() as server:
        with running(double, tmp_path, "acc") as capture:
            joined = double.add_node(server)

            def follows() -> bool:
                offset = capture.offset()
                return offset is not None and joined in offset.nodes

            capture.wait_for(follows)
        double.remove_node(joined)
        server.stop()
        failure = ClusterCapture(double, tmp_path, "acc").fails_to_start()
        assert isinstance(failure, NodeMissed)
        assert "Start its server again" in str(failure)
        server.start()
        with running(double, tmp_path) as capture:
            fill(double, "acc", 10)
            capture.assert_equal("acc")
            offset = capture.offset()
            assert offset is not None
            assert offset.retired == (joined,)
        double.servers.pop(joined)
