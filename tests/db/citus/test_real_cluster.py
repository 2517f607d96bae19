"""Capture and backfill of a real Citus cluster: runs where ``HEADWATER_TEST_CITUS`` is the coordinator's address.

It makes and drops tables of its own, a publication and slots, all called ``headwater_test``. The cluster needs two
workers at least, ``citus.enable_change_data_capture = on`` and the decoders of Citus; see docs/citus.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.db.capture.running import OPTIONS, RunningCapture

from headwater.capture import SourceState
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.errors import UnsupportedTable
from headwater.sources.open import diagnose, open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import SplitKind
from headwater.state import open_reader

DSN = os.environ.get("HEADWATER_TEST_CITUS", "")
NAME = "headwater_test"
pytestmark = pytest.mark.skipif(not DSN, reason="HEADWATER_TEST_CITUS is not set: no real cluster")


class Cluster:
    """The real cluster. :ivar dsn: as Headwater gets it."""

    def __init__(self) -> None:
        self.dsn = f"citus://{DSN.partition('://')[2]}"
        self.session = psycopg.connect(f"postgresql://{DSN.partition('://')[2]}", autocommit=True)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            cursor = self.session.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
        return rows

    def clean(self) -> None:
        self.execute(f"DROP TABLE IF EXISTS {NAME}_acc, {NAME}_ref", f"DROP PUBLICATION IF EXISTS {NAME}")
        drop = f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = ''{NAME}''"
        self.execute(f"SELECT run_command_on_all_nodes('{drop}')")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.clean()
        _fill(made)
        yield made
        made.clean()
    finally:
        made.session.close()


def _fill(made: Cluster) -> None:
    made.execute(
        f"CREATE TABLE {NAME}_acc (id bigint PRIMARY KEY, v text)",
        f"SELECT create_distributed_table('{NAME}_acc', 'id', shard_count => 4)",
        f"CREATE TABLE {NAME}_ref (id bigint PRIMARY KEY, v text)",
        f"SELECT create_reference_table('{NAME}_ref')",
        f"INSERT INTO {NAME}_acc SELECT i, 'v' || i FROM generate_series(1, 500) i",
        f"INSERT INTO {NAME}_ref SELECT i, 'v' || i FROM generate_series(1, 20) i",
    )


class RealCapture(RunningCapture):
    """A capture of the real cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        names = [f"{NAME}_acc", f"{NAME}_ref"]
        super().__init__(cluster, folder, names, slot=NAME, publication=NAME)  # type: ignore[arg-type]

    def wait_until_replayed(self, log: str, expected: dict[int, str]) -> None:
        end = time.monotonic() + 60
        while True:
            if self.failure is not None:
                raise self.failure
            found = {row["id"]: row["v"] for row in self.replayed(f"public.{log}").to_pylist()}
            if found == expected:
                return
            assert time.monotonic() < end, (len(found), len(expected))
            time.sleep(0.1)


def test_the_doctor_finds_no_problem(cluster: Cluster) -> None:
    found = diagnose(cluster.dsn, [f"{NAME}_acc", f"{NAME}_ref"], slot=NAME, publication=NAME)
    assert found.is_healthy, found.to_json()
    shards = [one for (one,) in cluster.execute("SELECT shard_name(logicalrelid, shardid)::text FROM pg_dist_shard")]
    unnamed = diagnose(cluster.dsn, [], slot=NAME, publication=NAME)
    assert not {one.table for one in unnamed.findings} & {f"public.{one}" for one in shards}


def test_a_columnar_table_is_refused(cluster: Cluster) -> None:
    cluster.execute(
        f"DROP TABLE {NAME}_acc",
        f"CREATE TABLE {NAME}_acc (id bigint PRIMARY KEY, v text) USING columnar",
        f"SELECT create_distributed_table('{NAME}_acc', 'id', shard_count => 4)",
    )
    source = open_source(cluster.dsn, spill=Path("unused"), slot=NAME, publication=NAME)
    try:
        with pytest.raises(UnsupportedTable, match="columnar") as refused:
            source.tables([f"{NAME}_acc"])
        cluster.execute(str(refused.value.next_step).removeprefix("Run: "))
        assert len(source.tables([f"{NAME}_acc"])) == 1
    finally:
        source.close()


def test_changes_come_once_from_all_nodes_also_after_a_shard_moved(cluster: Cluster, tmp_path: Path) -> None:
    capture = RealCapture(cluster, tmp_path)
    capture.options = OPTIONS
    capture.start()
    try:
        cluster.execute(
            f"UPDATE {NAME}_acc SET v = 'changed' WHERE id <= 300",
            f"DELETE FROM {NAME}_acc WHERE id <= 100",
            f"UPDATE {NAME}_ref SET v = 'changed'",
        )
        expected = dict.fromkeys(range(101, 301), "changed")
        capture.wait_until_replayed(f"{NAME}_acc", expected)
        capture.wait_until_replayed(f"{NAME}_ref", dict.fromkeys(range(1, 21), "changed"))
        shard, group, host, port = cluster.execute(
            "SELECT p.shardid, p.groupid, n.nodename, n.nodeport FROM pg_dist_placement p JOIN pg_dist_shard s USING"
            " (shardid) JOIN pg_dist_node n USING (groupid) WHERE n.groupid <> 0 AND"
            f" s.logicalrelid = '{NAME}_acc'::regclass LIMIT 1"
        )[0]
        to_host, to_port = cluster.execute(
            f"SELECT nodename, nodeport FROM pg_dist_node WHERE groupid NOT IN (0, {group}) AND noderole = 'primary'"
            " LIMIT 1"
        )[0]
        cluster.execute(
            f"SELECT citus_move_shard_placement({shard}, '{host}', {port}, '{to_host}', {to_port}, 'force_logical')",
            f"UPDATE {NAME}_acc SET v = 'moved'",
        )
        rows = dict(cluster.execute(f"SELECT id, v FROM {NAME}_acc"))
        moved = {key: value for key, value in rows.items() if value == "moved"}
        capture.wait_until_replayed(f"{NAME}_acc", moved)
        capture.assert_once(f"public.{NAME}_acc", f"public.{NAME}_ref")
        with open_reader(capture.store) as reader, reader.snapshot() as view:
            record, _ = SourceState.read(view)
        assert record is not None
        assert isinstance(record.offset, CitusOffset)
        assert len(record.offset.nodes) >= 3
    finally:
        capture.capture.stop()
        capture._thread.join(60)


@pytest.mark.parametrize("kind", list(SplitKind))
def test_a_snapshot_reads_each_row_once(cluster: Cluster, kind: SplitKind) -> None:
    source = open_source(cluster.dsn, spill=Path("unused"), slot=NAME, publication=NAME)
    tables = source.tables([f"{NAME}_acc", f"{NAME}_ref"])
    source.close()
    snapshots = open_snapshots(cluster.dsn)
    snapshot = snapshots.export()
    try:
        for table, rows in zip(tables, (500, 20), strict=True):
            plan = snapshot.plan(table, split_rows=100, kind=kind)
            found = [
                key
                for split in plan.splits
                for batch in snapshots.read(table, plan.kind, split.range, snapshot.name, columns=["id"])
                for key in batch.column(0).to_pylist()
            ]
            assert sorted(found) == list(range(1, rows + 1))
    finally:
        snapshot.close()
