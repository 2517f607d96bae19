"""Every schema change of Postgres: the mirror equals the source, and is read again only where no log has the values.

All cases share one capture and one query, a table each: while the capture runs, and while it is down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.capture.running import OPTIONS, RunningCapture
from tests.sampled import SOAK
from tests.servers.postgres import Database, PostgresServer

from headwater.capture import TableState
from headwater.capture.options import OnRewrite
from headwater.sources.open import open_source

pytestmark = pytest.mark.db

ROWS = 40
PLAIN = ("CREATE TABLE {t} (id int PRIMARY KEY, v int, w int)", "INSERT INTO {t} SELECT n, n, -n FROM {n}")


@dataclass(frozen=True)
class Case:
    """*change* happens to a table that *create* made; the transactions of one text are one.

    :ivar reread: whether the rows are read once more; ``None``: it depends on what is seen first.
    """

    change: tuple[str, ...]
    create: tuple[str, ...] = PLAIN
    reread: bool | None = True


ROW = "INSERT INTO {t} (id) VALUES (1001)"
TYPED = "CREATE TABLE {t} (id int PRIMARY KEY, v %s)", "INSERT INTO {t} SELECT n, %s FROM {n}"


def typed(kind: str, value: str) -> tuple[str, ...]:
    return TYPED[0] % kind, TYPED[1] % value


PARTS = (
    "CREATE TABLE {t} (id int, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_a PARTITION OF {t} FOR VALUES FROM (0) TO (20)",
    "CREATE TABLE {t}_b PARTITION OF {t} FOR VALUES FROM (20) TO (2000)",
    "CREATE TABLE {t}_c (id int PRIMARY KEY, v int)",
    "INSERT INTO {t}_c SELECT 5000 + n, n FROM {n}",
    "INSERT INTO {t} SELECT n, n FROM {n}",
)

CASES = {
    "t_drop_add": Case(("ALTER TABLE {t} DROP v, ADD v int", ROW), reread=None),
    "t_drop_add_two": Case(("ALTER TABLE {t} DROP v", "ALTER TABLE {t} ADD v int", ROW), reread=None),
    "t_drop_add_default": Case(("ALTER TABLE {t} DROP v, ADD v int DEFAULT 7", ROW), reread=None),
    "t_swap": Case(
        (
            "ALTER TABLE {t} RENAME v TO x; ALTER TABLE {t} RENAME w TO v; ALTER TABLE {t} RENAME x TO w",
            "UPDATE {t} SET v = 5 WHERE id = 3",
        ),
        reread=False,
    ),
    "t_chain": Case(("ALTER TABLE {t} RENAME v TO x; ALTER TABLE {t} RENAME w TO v", ROW), reread=False),
    "t_silent_rename": Case(("ALTER TABLE {t} RENAME v TO x",), reread=False),
    "t_silent_add": Case(("ALTER TABLE {t} ADD x text",), reread=False),
    "t_silent_default": Case(("ALTER TABLE {t} ADD x text DEFAULT 'old'",), reread=None),
    "t_default_renamed": Case(
        ("ALTER TABLE {t} ADD x int DEFAULT 4", ROW, "ALTER TABLE {t} RENAME x TO y"), reread=None
    ),
    "t_volatile": Case(("ALTER TABLE {t} ADD x uuid DEFAULT gen_random_uuid()",)),
    "t_serial": Case(("ALTER TABLE {t} ADD x serial", ROW)),
    "t_identity": Case(("ALTER TABLE {t} ADD x int GENERATED ALWAYS AS IDENTITY",)),
    "t_using": Case(("ALTER TABLE {t} ALTER v TYPE bigint USING v * 2", ROW)),
    "t_using_same_type": Case(("ALTER TABLE {t} ALTER v TYPE int USING v * 2",)),
    "t_to_numeric": Case(("ALTER TABLE {t} ALTER v TYPE numeric", ROW)),
    "t_to_text": Case(("ALTER TABLE {t} ALTER v TYPE text", ROW)),
    "t_seconds": Case(
        ("ALTER TABLE {t} ALTER v TYPE timestamp(0)",), typed("timestamp", "timestamp '2024-01-01 1:2:3.456'")
    ),
    "t_digits": Case(("ALTER TABLE {t} ALTER v TYPE numeric(10,1)", ROW), typed("numeric(10,4)", "n / 3.0")),
    "t_char_text": Case(("ALTER TABLE {t} ALTER v TYPE text", ROW), typed("char(9)", "'a ' || n")),
    "t_jsonb": Case(("ALTER TABLE {t} ALTER v TYPE jsonb USING v::jsonb",), typed("json", '\'{{"b":1,  "a":2}}\'')),
    "t_wider_text": Case(
        ("ALTER TABLE {t} ALTER v TYPE varchar(90)", ROW), typed("varchar(9)", "'a' || n"), reread=False
    ),
    "t_wider_digits": Case(
        ("ALTER TABLE {t} ALTER v TYPE numeric(12,4)", ROW), typed("numeric(10,4)", "n"), reread=False
    ),
    "t_enum": Case(
        ("ALTER TYPE {t}_mood RENAME VALUE 'sad' TO 'blue'",),
        ("CREATE TYPE {t}_mood AS ENUM ('sad', 'glad')", *typed("{t}_mood", "'sad'")),
    ),
    "t_enum_added": Case(
        ("ALTER TYPE {t}_mood ADD VALUE 'new'", "INSERT INTO {t} VALUES (1001, 'new')"),
        ("CREATE TYPE {t}_mood AS ENUM ('sad', 'glad')", *typed("{t}_mood", "'sad'")),
        reread=False,
    ),
    "t_composite": Case(
        ("ALTER TYPE {t}_pair ADD ATTRIBUTE c int",),
        ("CREATE TYPE {t}_pair AS (a int, b int)", *typed("{t}_pair", "ROW(n, n)::{t}_pair")),
    ),
    "t_exchange": Case(
        ("ALTER TABLE {t} RENAME TO {t}_old; ALTER TABLE {t}_new RENAME TO {t}", "INSERT INTO {t} VALUES (1001, 1)"),
        (*PLAIN, "CREATE TABLE {t}_new (id int PRIMARY KEY, z int)", "INSERT INTO {t}_new SELECT n, 3 FROM {n}"),
    ),
    "t_create_again": Case(
        ("DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, z text)", "INSERT INTO {t} VALUES (9, 'a')")
    ),
    "t_key": Case(
        ("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (v)", "INSERT INTO {t} VALUES (1001, 1001)"),
    ),
    "t_full": Case(("ALTER TABLE {t} REPLICA IDENTITY FULL", "UPDATE {t} SET v = 9 WHERE id < 5"), reread=False),
    "t_attach": Case(("ALTER TABLE {t} ATTACH PARTITION {t}_c FOR VALUES FROM (5000) TO (9000)",), PARTS),
    "t_detach": Case(("ALTER TABLE {t} DETACH PARTITION {t}_a",), PARTS),
    "t_truncate_leaf": Case(("TRUNCATE {t}_a",), PARTS),
    "t_leaf_full": Case(("ANALYZE {t}_b", "VACUUM FULL {t}_b"), PARTS, reread=None),
    "t_vacuum_full": Case(("VACUUM FULL {t}", ROW), reread=False),
    "t_cluster": Case(("CLUSTER {t} USING {t}_pkey",), reread=False),
    "t_analyze": Case(("ANALYZE {t}",), reread=False),
    "t_add_drop_add": Case(
        ("ALTER TABLE {t} ADD x int", ROW, "ALTER TABLE {t} DROP x", "ALTER TABLE {t} ADD x int"), reread=None
    ),
    "t_volatile_then_rename": Case(
        ("ALTER TABLE {t} ADD x float DEFAULT random()", "ALTER TABLE {t} RENAME x TO y", ROW)
    ),
}


def filled(statement: str, name: str) -> list[str]:
    """The statements of one transaction, for the table of a case."""
    if statement.startswith(("VACUUM", "CLUSTER")):
        return [statement.format(t=name)]
    return ["BEGIN", *statement.format(t=name, n=f"generate_series(1, {ROWS}) n").split("; "), "COMMIT"]


@pytest.mark.parametrize(
    ("major", "while_down"),
    [(15, False), (18, True), *([(15, True), (18, False)] if SOAK else [])],
    ids=lambda value: {True: "down", False: "running"}.get(value, f"pg{value}"),
)
def test_the_mirror_equals_the_source_after(
    postgres_servers: Callable[[int], PostgresServer], tmp_path: Path, major: int, while_down: bool
) -> None:
    with postgres_servers(major).database() as postgres:
        _equal_after(postgres, tmp_path, while_down)


def _equal_after(postgres: Database, tmp_path: Path, while_down: bool) -> None:
    tables = [f"public.{name}" for name in CASES]
    for name, case in CASES.items():
        for statement in case.create:
            postgres.execute(*filled(statement, name))
    capture = RunningCapture(postgres, tmp_path, tables)
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD, heartbeat_seconds=0.5)
    capture.start()
    capture.wait_for(lambda: len(capture.tables()) == len(tables))
    query = Delivering(capture, *tables, keyed=True)
    try:
        query.finish()
        read = {table: sum(query.sink.history.get(table, Counter()).values()) for table in tables}
        since = {name: table.since for name, table in capture.tables().items()}
        if while_down:
            capture.stop()
        for name, case in CASES.items():
            for statement in case.change:
                postgres.execute(*filled(statement, name))
        if while_down:
            capture.start([])
        settle(capture, query)
        wrong = {table: difference(capture, query, table) for table in tables}
        assert {table: text for table, text in wrong.items() if text} == {}
        reread = {table for table in tables if capture.tables()[table].since != since[table]}
        more = {table for table in tables if sum(query.sink.history.get(table, Counter()).values()) > read[table]}
        for name, case in CASES.items():
            table = f"public.{name}"
            if case.reread is not None:
                assert (table in reread, table in more) == (case.reread,) * 2, name
    finally:
        query.close()
        capture.stop()


def settle(capture: RunningCapture, query: Delivering) -> None:
    """Until two looks at the catalog have passed and every table is captured and read."""
    looks: list[float] = []

    def is_settled() -> bool:
        checked = capture.capture.statistics.checked_time
        if capture.failure is not None:
            raise capture.failure
        active = all(table.state is TableState.ACTIVE for table in capture.tables().values())
        if not active or not query.planner.is_history_done():
            looks.clear()
        elif checked not in looks:
            looks.append(checked)
        return len(looks) > 4

    query.run_until(is_settled)
    query.finish()


def difference(capture: RunningCapture, query: Delivering, name: str) -> str | None:
    source = open_source(capture.database.dsn, spill=capture.folder / "unused")
    (table,) = source.tables([name])
    source.close()
    columns = table.schema.names
    expected = {tuple(row[key] for key in table.key_columns): row for row in capture.selected(table).to_pylist()}
    found = query.sink.mirror.get(name, {})
    if found.keys() != expected.keys():
        return f"{len(found)} rows for {len(expected)}"
    wrong = [key for key, row in expected.items() if {column: found[key].get(column) for column in columns} != row]
    return f"{len(wrong)} of {len(expected)} rows differ: {expected[wrong[0]]}, {found[wrong[0]]}" if wrong else None
