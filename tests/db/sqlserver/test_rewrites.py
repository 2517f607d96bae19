"""Tables that must be read again, by themselves, and those that a person must repair first: on the double.

All cases that are read again share one capture, a table each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.db.backfill.test_schema_changes import difference, settle
from tests.db.sqlserver.running import SqlServerCapture, SqlServerDelivering
from tests.servers.sqlserver import track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.capture.options import OnRewrite


@dataclass(frozen=True)
class Case:
    """*change* happens to a table with the column ``v`` of the type *kind*.

    :ivar reread: whether the rows are read once more.
    """

    change: tuple[str, ...]
    kind: str = "int"
    value: str = "7"
    reread: bool = True


DISABLE = "EXEC sys.sp_cdc_disable_table @source_schema = N'shop', @source_name = N'{t}', @capture_instance = N'all'"
ENABLE = "EXEC sys.sp_cdc_enable_table @source_schema = N'shop', @source_name = N'{t}', @role_name = NULL"
NEWER = ENABLE + ", @capture_instance = N'{t}_newer'"
MOMENT = "'2024-01-02 03:04:05.6'"

CASES = {
    "fewer_digits": Case(("ALTER TABLE shop.{t} ALTER COLUMN v datetime2(0)",), "datetime2(3)", MOMENT),
    "padded": Case(("ALTER TABLE shop.{t} ALTER COLUMN v char(9)",), "varchar(9)", "'ab'"),
    "rounded": Case(("ALTER TABLE shop.{t} ALTER COLUMN v decimal(9,0)",), "decimal(9,2)", "1.50"),
    "as_text": Case(
        ("ALTER TABLE shop.{t} ALTER COLUMN v varchar(40)", "INSERT INTO shop.{t} VALUES (9, '1.5')"), "money", "1.5"
    ),
    "longer": Case(("ALTER TABLE shop.{t} ALTER COLUMN v varchar(90)",), "varchar(9)", "'ab'", reread=False),
    "column_late": Case(
        (
            "ALTER TABLE shop.{t} ADD w int",
            "UPDATE shop.{t} SET w = 5 WHERE id = 1",
            "wait",
            NEWER,
            "UPDATE shop.{t} SET w = 6",
        )
    ),
    "instance_again": Case((DISABLE, "UPDATE shop.{t} SET v = 8", ENABLE, "UPDATE shop.{t} SET v = 9 WHERE id = 1")),
    "table_again": Case(
        (
            "DROP TABLE shop.{t}",
            "CREATE TABLE shop.{t} (id bigint NOT NULL PRIMARY KEY, z varchar(9))",
            "INSERT INTO shop.{t} VALUES (4, 'new')",
            ENABLE,
        )
    ),
    "replaced_column": Case(
        (
            "ALTER TABLE shop.{t} DROP COLUMN v",
            "ALTER TABLE shop.{t} ADD v int",
            NEWER,
            "UPDATE shop.{t} SET v = 5 WHERE id = 1",
        ),
        reread=False,
    ),
}


def change(double: SqlServerDouble, capture: SqlServerCapture, name: str) -> None:
    """What happens to the table of a case; the capture does not see half of it, but where it waits."""
    statements = [statement.format(t=name) for statement in CASES[name].change]
    while "wait" in statements:
        at = statements.index("wait")
        double.execute(*statements[:at])
        capture.catch_up()
        del statements[: at + 1]
    with double.engine.lock:
        double.execute(*statements)


def test_the_mirror_equals_the_source_after(double: SqlServerDouble, tmp_path: Path) -> None:
    tables = [f"shop.{name}" for name in CASES]
    for name, case in CASES.items():
        values = ", ".join(f"({number}, {case.value})" for number in range(1, 4))
        double.execute(
            f"CREATE TABLE shop.{name} (id bigint NOT NULL PRIMARY KEY, v {case.kind})",
            f"INSERT INTO shop.{name} VALUES {values}",
        )
    track(double, *CASES)
    capture = SqlServerCapture(double, tmp_path, tables)
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD)
    capture.start()
    query = SqlServerDelivering(capture, *tables, keyed=True)
    try:
        query.finish()
        since = {name: table.since for name, table in capture.tables().items()}
        for name in CASES:
            change(double, capture, name)
        settle(capture, query)
        assert {table: text for table in tables if (text := difference(capture, query, table))} == {}
        after = {name: table.since for name, table in capture.tables().items()}
        reread = {name for name in CASES if after[f"shop.{name}"] != since[f"shop.{name}"]}
        assert reread == {name for name, case in CASES.items() if case.reread}
        settle(capture, query)
        assert {name: table.since for name, table in capture.tables().items()} == after  # and not once more
    finally:
        query.close()
        capture.stop()


REPAIRED = {
    "dropped": (("DROP TABLE shop.{t}",), "The table was dropped at the source. Create it again, then run:"),
    "uncaptured": ((DISABLE,), "Its last capture instance was removed. Run: EXEC sys.sp_cdc_enable_table"),
    "replaced": (
        ("ALTER TABLE shop.{t} DROP COLUMN v", "ALTER TABLE shop.{t} ADD v int"),
        "The name 'v' means another column than in the capture instance. Run: EXEC sys.sp_cdc_enable_table",
    ),
}


def test_a_table_that_a_person_must_repair_first_stops_with_the_step(double: SqlServerDouble, tmp_path: Path) -> None:
    names = [*REPAIRED, "renamed"]
    for name in names:
        double.execute(f"CREATE TABLE shop.{name} (id bigint NOT NULL PRIMARY KEY, v int)")
    track(double, *names)
    capture = SqlServerCapture(double, tmp_path, [f"shop.{name}" for name in names])
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD)
    capture.start()
    for name, (statements, why) in REPAIRED.items():
        double.execute(*(statement.format(t=name) for statement in statements))
        reason = capture.wait_until_stopped(f"shop.{name}")
        assert why in reason
        assert reason.endswith(f"Then run: headwater resnapshot shop.{name}")
    double.engine.tables["shop", "renamed"].name = "elsewhere"
    assert "The table was renamed at the source. Rename it back" in capture.wait_until_stopped("shop.renamed")
    capture.stop()
