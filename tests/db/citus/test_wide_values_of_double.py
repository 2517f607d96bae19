"""Wide values that an update left alone, over a double of a Citus cluster: plain Postgres, not Citus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from tests.db.citus.running import running
from tests.db.citus.writing import fill
from tests.servers.citus_double import CitusDouble

from headwater.sources.citus.cluster import Cluster
from headwater.sources.open import open_source
from headwater.sources.postgres.connection import Connection, connect
from headwater.sources.postgres.decoder import RawColumn, RawRows
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.postgres.toast import complete
from headwater.sources.table import SourceTable

COLUMNS = "id bigint, v text, amount numeric(12,2)"
WIDE = "(SELECT string_agg(md5((id * 1000 + n)::text), '') FROM generate_series(1, 200) n)"


def test_wide_values_that_an_update_left_alone_are_read_from_the_shards(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", COLUMNS)
    with running(double, tmp_path, "acc", "ref") as capture:
        fill(double, "acc", 20)
        double.execute(0, "INSERT INTO ref SELECT i, 'v', i FROM generate_series(1, 5) i")
        for group, name in ((1, "acc"), (2, "acc"), (0, "ref")):
            double.execute(group, f"UPDATE {name} SET v = {WIDE}", f"UPDATE {name} SET amount = amount + 1")
        capture.assert_equal("acc", "ref")
        assert not any(row["_unavailable"] for name in ("acc", "ref") for row in capture.rows(f"public.{name}"))


def test_the_table_itself_is_asked_only_for_rows_that_are_in_no_shard_of_the_node(
    double: CitusDouble, tmp_path: Path
) -> None:
    """Of a cluster it would be a query over all nodes: while somebody locks the table, the shards can still be read."""
    double.distribute("acc", COLUMNS)
    fill(double, "acc", 20)
    double.execute(1, f"UPDATE acc SET v = {WIDE}")
    shards = [shard for shard, owner in double.tables["acc"].shards.items() if owner == 1]
    rows = dict(double.execute(1, "SELECT id, v FROM acc"))
    one, *others = rows
    cluster = Cluster(double.dsn)
    dsn = cluster.dsn_of(f"127.0.0.1:{double.servers[1].port}", 1)
    source = open_source(double.dsn.replace("citus", "postgresql").replace(*_ports(double)), spill=tmp_path)
    assert isinstance(source, PostgresSource)
    (table,) = source.tables(["acc"])
    source.close()

    @contextlib.contextmanager
    def session() -> Iterator[Connection]:
        with connect(dsn) as made:
            made.execute("SET lock_timeout = '5s'")
            yield made

    def read(keys: list[int], there: list[TableName]) -> list[object]:
        columns, unavailable = complete(_updates(table, keys), table, session, lambda _: there, lambda: None)
        assert unavailable.null_count == len(keys)
        return list(columns[1].to_pylist())

    try:
        placed = cluster.shards_on(1, TableName("public", "acc"))
        assert [str(name) for name in placed] == [f"public.acc_{shard}" for shard in sorted(shards)]
        with double.connect(1) as locking:
            locking.execute("BEGIN")
            locking.execute("LOCK TABLE ONLY acc IN ACCESS EXCLUSIVE MODE")
            assert read(list(rows), placed) == list(rows.values())
            locking.execute("ROLLBACK")
        # a shard that has gone elsewhere since, and one that is not there any more
        missing = [TableName("public", "acc_1"), *placed]
        for there in ([placed[0]], [placed[1]], missing):
            assert read([*others, one], there) == [rows[key] for key in (*others, one)]
        gone, unavailable = complete(_updates(table, [one, 10**6]), table, session, lambda _: placed, lambda: None)
        assert gone[1].to_pylist() == [rows[one], None]
        assert unavailable.to_pylist() == [None, "v"]
    finally:
        cluster.close()


def _ports(double: CitusDouble) -> tuple[str, str]:
    return f":{double.servers[0].port}/", f":{double.servers[1].port}/"


def _updates(table: SourceTable, keys: list[int]) -> RawRows:
    """Updates of these rows that tell nothing of ``v``."""
    unchanged = np.ones(len(keys), np.bool_)
    texts = pa.array([str(key) for key in keys], pa.string())
    count = len(keys)
    return RawRows(
        oid=table.source_id or 0,
        columns=[
            RawColumn(texts, None),
            RawColumn(pa.nulls(count, pa.string()), unchanged),
            RawColumn(pa.array(["1"] * count, pa.string()), None),
        ],
        ops=np.full(count, 3, np.int8),
        commit_lsn=np.zeros(count, np.uint64),
        commit_time=np.zeros(count, np.int64),
        xid=np.zeros(count, np.uint32),
        seq=np.zeros(count, np.uint32),
    )
