"""Iceberg tables in a SQL catalog in Postgres, whose answer to a commit is lost."""

from __future__ import annotations

from pathlib import Path

from tests.servers.postgres import Database
from tests.servers.proxy import CommitLosingProxy
from tests.store.sinks.file_sinks import INSERT, UPDATE, Feed, order
from tests.store.sinks.iceberg_tables import statuses

from headwater.sinks.iceberg import IcebergSink


def test_a_commit_whose_answer_is_lost_is_found_in_a_sql_catalog(newest_postgres: Database, tmp_path: Path) -> None:
    port = newest_postgres.server.port
    with CommitLosingProxy("127.0.0.1", port) as proxy:
        address = newest_postgres.dsn.replace(f":{port}/", f":{proxy.port}/")
        uri = address.replace("postgresql://", "postgresql+psycopg://")
        sink = IcebergSink(str(tmp_path), catalog_uri=uri)
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)))
        proxy.losing = True
        assert feed.changes(2, (UPDATE, order(1, "paid")), (INSERT, order(2)))
        assert proxy.lost == 1
        assert statuses(sink) == {1: "paid", 2: "new"}
        assert feed.changes(3, (INSERT, order(3)))
        assert statuses(sink) == {1: "paid", 2: "new", 3: "new"}
