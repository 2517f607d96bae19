"""The tables of one batch are committed side by side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from deltalake import DeltaTable
from tests.db.capture.running import running
from tests.here import Here
from tests.servers.postgres import Database

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Mode, Staged, Token
from headwater.sources.table import SourceTable

pytestmark = pytest.mark.db

TABLES = ("public.a", "public.b", "public.c")


class MeetingSink(DeltaSink):
    """Each commit waits until those of all tables have begun."""

    begun: ClassVar = threading.Barrier(len(TABLES), timeout=30)

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        self.begun.wait()
        return super().commit(table, token, staged)


def test_a_commit_of_one_table_begins_while_those_of_others_are_under_way(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(*(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in TABLES))
    with running(newest_postgres, tmp_path, *TABLES) as capture:
        options = QueryOptions(str(capture.store), newest_postgres.dsn, "many", TABLES, history=False)
        sink = MeetingSink(str(tmp_path / "lake"), mode=Mode.CHANGES)
        with DeliveryLoop(Delivery(options, sink), Here()) as loop:
            with newest_postgres.connect() as session, session.transaction():
                for table in TABLES:
                    session.execute(f"INSERT INTO {table} VALUES (1)")
            capture.catch_up()
            while loop.plan(0.2):
                loop.deliver()
    for table in TABLES:
        assert DeltaTable(tmp_path / "lake" / table).to_pyarrow_table(columns=["id"]).num_rows == 1
