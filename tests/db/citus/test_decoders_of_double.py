"""How the nodes of a cluster decode their logs, over a double of a Citus cluster: plain Postgres, not Citus."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.citus.running import ClusterCapture, running
from tests.servers.citus_double import CitusDouble, Nodes

from headwater.sources.citus.snapshots import CitusSnapshots
from headwater.sources.errors import SourceMisconfigured

COLUMNS = "id bigint, v text, amount numeric(12,2)"


def test_no_node_tells_a_large_transaction_before_its_commit(double: CitusDouble, tmp_path: Path) -> None:
    """In such blocks a node of a real cluster tells no row of a shard."""
    double.distribute("acc", COLUMNS)
    double.everywhere(f"ALTER DATABASE {double.database} SET logical_decoding_work_mem = '64kB'")
    with running(double, tmp_path, "acc") as capture:
        shard = next(shard for shard, owner in double.tables["acc"].shards.items() if owner == 1)
        number = list(double.tables["acc"].shards).index(shard)
        double.execute(
            1,
            "INSERT INTO acc SELECT i, repeat('v', 100), 0 FROM generate_series(1, 8000) i"
            f" WHERE satisfies_hash_partition('acc'::regclass, 4, {number}, i::bigint)",
        )
        capture.assert_equal("acc")
        assert capture.replayed("public.acc").num_rows > 1000
        told = "SELECT spill_txns > 0, stream_txns FROM pg_stat_replication_slots WHERE slot_name = 'headwater'"
        capture.wait_for(lambda: double.execute(1, told)[0][0])
        assert double.execute(1, told) == [(True, 0)]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("citus.enable_change_data_capture", "off"),
        pytest.param("dynamic_library_path", "$libdir", marks=pytest.mark.soak),
    ],
)
def test_a_node_that_does_not_decode_as_citus_does_is_refused_with_what_mends_it(
    double: CitusDouble, tmp_path: Path, setting: str, value: str
) -> None:
    double.distribute("acc", COLUMNS)
    double.execute(2, f"ALTER DATABASE {double.database} SET {setting} = '{value}'")
    capture = ClusterCapture(double, tmp_path, "acc")
    for _ in range(2):  # before anything is made; and, below, with what was made when all was well
        failure = capture.fails_to_start()
        assert isinstance(failure, SourceMisconfigured)
        assert f"127.0.0.1:{double.servers[2].port}" in failure.message
        assert f"ALTER SYSTEM SET {setting} = " in (failure.next_step or "")
        double.execute(2, f"ALTER DATABASE {double.database} RESET ALL")
        with running(double, tmp_path, "acc"):
            pass
        double.execute(2, f"ALTER DATABASE {double.database} SET {setting} = '{value}'")


def test_a_node_that_joins_without_the_decoder_stops_the_capture(
    double: CitusDouble, nodes: Nodes, tmp_path: Path
) -> None:
    double.distribute("acc", COLUMNS)
    with running(double, tmp_path, "acc"):
        pass
    joined = double.add_node(nodes.server(3))
    double.execute(joined, f"ALTER DATABASE {double.database} SET citus.enable_change_data_capture = off")
    failure = ClusterCapture(double, tmp_path, "acc").fails_to_start()
    assert isinstance(failure, SourceMisconfigured)
    assert f"127.0.0.1:{double.servers[joined].port}" in failure.message
    assert double.execute(joined, "SELECT 1 FROM pg_replication_slots WHERE database = current_database()") == []


def test_a_snapshot_knows_the_newest_node_though_it_was_removed(double: CitusDouble, nodes: Nodes) -> None:
    joined = double.add_node(nodes.server(3))
    double.remove_node(joined)
    snapshot = CitusSnapshots(double.dsn).export()
    try:
        assert [group for group, _ in snapshot.mark.nodes] == [0, 1, 2]
        assert snapshot.mark.last_group == joined
    finally:
        snapshot.close()
