"""The doctor over a double of a Citus cluster (plain Postgres, not Citus): what each node lacks, and what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.citus.running import running
from tests.servers.citus_double import CitusDouble

from headwater.sources.diagnosis import Finding, Level
from headwater.sources.errors import UnsupportedTable
from headwater.sources.open import diagnose, open_source

COLUMNS = "id bigint, v text, amount numeric(12,2)"


def findings(double: CitusDouble, *tables: str) -> list[Finding]:
    found = diagnose(double.dsn, tables, slot="headwater", publication="headwater")
    assert "citus://" in found.source
    assert double.servers[0].password not in str(found.to_json())
    return list(found.findings)


def test_a_cluster_that_is_ready_has_no_problem(double: CitusDouble) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", COLUMNS)
    found = findings(double, "acc", "ref")
    assert [one for one in found if one.level is Level.PROBLEM] == []
    placements = {one.table: one.text for one in found if one.check == "placement"}
    assert placements == {
        "public.acc": "It is distributed, 4 shards; told by 2 nodes.",
        "public.ref": "It is reference; told by 1 nodes.",
    }
    assert sum(one.check == "citus" for one in found) == 3


def test_what_is_missing_on_one_node_is_told_with_what_mends_it(double: CitusDouble, tmp_path: Path) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", COLUMNS)
    with running(double, tmp_path, "acc"):
        pass
    double.execute(2, "SELECT pg_drop_replication_slot('headwater')")
    double.execute(0, "DELETE FROM pg_dist_placement p USING pg_dist_shard s WHERE p.groupid = 0")
    double.execute(1, f"ALTER DATABASE {double.database} SET citus.enable_change_data_capture = off")
    problems = {(one.check, one.fix): one.text for one in findings(double, "acc", "ref") if one.level is Level.PROBLEM}
    one, two = (f"127.0.0.1:{double.servers[group].port}" for group in (1, 2))
    slot = problems["slot", "headwater resnapshot"]
    assert two in slot
    cdc = problems["citus", "ALTER SYSTEM SET citus.enable_change_data_capture = on; SELECT pg_reload_conf();"]
    assert one in cdc
    own = double.servers[0].port
    assert ("placement", f"SELECT citus_set_coordinator_host('127.0.0.1', {own});") in problems


def test_a_single_server_is_told_apart_from_a_cluster(double: CitusDouble) -> None:
    double.execute(0, "SET allow_system_table_mods = on; DROP TABLE pg_catalog.pg_dist_node")
    found = [one for one in findings(double) if one.check == "cluster"]
    assert [one.level for one in found] == [Level.PROBLEM]
    assert "postgresql://" in str(found[0].fix)


def test_shards_are_not_listed_as_tables(double: CitusDouble) -> None:
    double.distribute("acc", COLUMNS)
    for group in (0, 1):  # in a real cluster shards are no partitions: these are as there, and lack a key
        double.execute(group, "CREATE TABLE acc_102500 (id bigint)", "CREATE TABLE kept_102501 (id bigint)")
    double.execute(0, "INSERT INTO pg_dist_shard VALUES ('acc', 102500)")
    found = findings(double)
    assert {one.table for one in found if one.table} == {"public.kept_102501"}
    assert "1 of 2 tables can be captured." in [one.text for one in found if one.check == "tables"]


def test_an_access_method_called_columnar_over_plain_postgres_is_refused_with_the_reason(double: CitusDouble) -> None:
    double.everywhere("CREATE ACCESS METHOD columnar TYPE TABLE HANDLER heap_tableam_handler")
    double.distribute("acc", COLUMNS)
    double.execute(0, "CREATE TABLE own (id bigint PRIMARY KEY) USING columnar")
    double.execute(0, "CREATE TABLE parted (id bigint PRIMARY KEY) PARTITION BY RANGE (id)")
    double.execute(0, "CREATE TABLE old PARTITION OF parted FOR VALUES FROM (0) TO (9) USING columnar")
    source = open_source(double.dsn, spill=Path("unused"))
    try:
        for name, stored in (("own", "own"), ("parted", "old")):
            with pytest.raises(UnsupportedTable, match="access method 'columnar'") as refused:
                source.tables([name])
            step = f"""SELECT alter_table_set_access_method('"public"."{stored}"', 'heap');"""
            assert refused.value.next_step == f"Run: {step}"
            (problem,) = [one for one in findings(double, name) if one.check == "logging"]
            assert (problem.level, problem.fix) == (Level.PROBLEM, step)
        double.execute(0, "ALTER TABLE own SET ACCESS METHOD heap")
        assert len(source.tables(["own", "acc"])) == 2
    finally:
        source.close()
