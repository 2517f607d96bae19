"""Tables whose logs no longer give their rows, over a double of a Citus cluster: plain Postgres, not Citus.

All cases share one capture, a table each: while the capture runs, and while it is down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.test_schema_changes import difference, settle
from tests.db.citus.running import ClusterCapture
from tests.db.citus.test_splits_of_double import first_shard
from tests.db.citus.writing import fill
from tests.servers.citus_double import CitusDouble

from headwater.capture import TableState
from headwater.capture.options import OnRewrite


@dataclass(frozen=True)
class Case:
    """*change* happens on every node. :ivar row: rows are written on every node after it.

    :ivar reread: whether the rows are read once more.
    """

    change: tuple[str, ...]
    row: bool = False
    reread: bool = True


SWAP = (
    "ALTER TABLE {t} RENAME v TO x",
    "ALTER TABLE {t} RENAME note TO v",
    "ALTER TABLE {t} RENAME x TO note",
)
CASES = {
    "replaced": Case(("ALTER TABLE {t} DROP v, ADD v text",), row=True),
    "swapped": Case(SWAP, row=True),
    "doubled": Case(("ALTER TABLE {t} ALTER amount TYPE numeric(12,2) USING amount * 2",)),
    "label": Case(("ALTER TYPE {t}_mood RENAME VALUE 'sad' TO 'blue'",)),
    "emptied": Case(("TRUNCATE {t}",)),
    "renamed": Case(("ALTER TABLE {t} RENAME v TO x",), reread=False),
    "grown": Case(("ALTER TABLE {t} DROP v, ADD x int",), reread=False),
    "wider": Case(("ALTER TABLE {t} ALTER amount TYPE numeric(20,2)",), row=True, reread=False),
}
LOCAL = ("created_again", "detached")


def create(double: CitusDouble) -> None:
    for name in CASES:
        double.everywhere(f"CREATE TYPE {name}_mood AS ENUM ('sad', 'glad')")
        columns = f"id bigint, v text, amount numeric(12,2), note text DEFAULT 'n', mood {name}_mood DEFAULT 'sad'"
        double.distribute(name, columns, shards=2)
        fill(double, name, 10)
    double.execute(
        0,
        "CREATE TABLE created_again (id bigint PRIMARY KEY, v text)",
        "INSERT INTO created_again VALUES (1, 'old')",
        "CREATE TABLE detached (id bigint PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE detached_1 PARTITION OF detached FOR VALUES FROM (0) TO (5)",
        "CREATE TABLE detached_2 PARTITION OF detached FOR VALUES FROM (5) TO (9)",
        "INSERT INTO detached VALUES (1), (6)",
    )


def change(double: CitusDouble) -> None:
    for name, case in CASES.items():
        for statement in case.change:
            double.everywhere(statement.format(t=name))
        if case.row:
            for group in (1, 2):
                double.execute(group, f"UPDATE {name} SET amount = amount + 1 WHERE id < 4")
    double.execute(
        0,
        "DROP TABLE created_again",
        "CREATE TABLE created_again (id bigint PRIMARY KEY, z int)",
        "INSERT INTO created_again VALUES (2, 3)",
        "ALTER TABLE detached DETACH PARTITION detached_1",
    )


@pytest.mark.parametrize(
    "while_down", [False, pytest.param(True, marks=pytest.mark.soak)], ids=lambda value: "down" if value else "running"
)
def test_the_mirror_equals_the_source_after(double: CitusDouble, tmp_path: Path, while_down: bool) -> None:
    create(double)
    tables = [f"public.{name}" for name in (*CASES, *LOCAL)]
    capture = ClusterCapture(double, tmp_path, *tables)
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD, heartbeat_seconds=0.2)
    capture.start()
    query = Delivering(capture, *tables, keyed=True, parallelism=20)
    try:
        query.finish()
        since = {name: table.since for name, table in capture.tables().items()}
        if while_down:
            capture.stop()
        change(double)
        if while_down:
            capture.start([])
        settle(capture, query)
        assert {table: text for table in tables if (text := difference(capture, query, table))} == {}
        after = {name: table.since for name, table in capture.tables().items()}
        reread = {name for name in tables if after[name] != since[name]}
        kept = {f"public.{name}" for name, case in CASES.items() if not case.reread}
        assert reread == set(tables) - kept
    finally:
        query.close()
        capture.stop()


@pytest.mark.soak
def test_a_split_that_was_missed_is_read_again_once(double: CitusDouble, tmp_path: Path) -> None:
    """The shards of now are noted with the position, so the same split does not stop it again."""
    double.distribute("acc", "id bigint, v text, amount numeric(12,2)")
    fill(double, "acc", 20)
    capture = ClusterCapture(double, tmp_path, "acc")
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD, heartbeat_seconds=0.2)
    capture.start()
    query = Delivering(capture, "public.acc", keyed=True)
    query.finish()
    capture.stop()
    shard = first_shard(double)
    double.split("acc", shard, f"UPDATE acc_{shard} SET v = 'told by nobody'")
    since = capture.tables()["public.acc"].since
    capture.start([])
    query.run_until(lambda: capture.tables()["public.acc"].since != since)
    after = capture.tables()["public.acc"].since
    settle(capture, query)
    assert capture.tables()["public.acc"].since == after
    assert difference(capture, query, "public.acc") is None
    query.close()
    capture.stop()


def test_a_table_is_read_again_when_all_nodes_have_its_columns(double: CitusDouble, tmp_path: Path) -> None:
    """Before that a node could send rows that the columns of the coordinator do not have, again and again."""
    double.distribute("acc", "id bigint, v text, amount numeric(12,2)", shards=2)
    fill(double, "acc", 10)
    capture = ClusterCapture(double, tmp_path, "acc")
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD, heartbeat_seconds=0.2)
    capture.start()
    since = capture.tables()["public.acc"].since
    double.execute(1, "ALTER TABLE acc ADD z int", "UPDATE acc SET z = 1")
    capture.wait_for(lambda: capture.tables()["public.acc"].state is TableState.REREADING)
    double.execute(1, "UPDATE acc SET z = 2")
    capture.catch_up()
    assert (capture.tables()["public.acc"].state, capture.tables()["public.acc"].since) == (TableState.REREADING, since)
    for group in (0, 2):
        double.execute(group, "ALTER TABLE acc ADD z int")
    capture.wait_for(lambda: capture.tables()["public.acc"].state is TableState.ACTIVE)
    double.execute(1, "UPDATE acc SET z = 3")
    capture.catch_up()
    assert [row["z"] for row in capture.rows("public.acc") if row["z"] is not None] == [3] * len(
        double.execute(1, "TABLE acc")
    )
    capture.stop()
