"""The doctor over a double of a Citus cluster (plain Postgres, not Citus): what each node lacks, and what mends it."""

from __future__ import annotations

from pathlib import Path

from tests.db.citus.running import running
from tests.servers.citus_double import CitusDouble

from headwater.sources.diagnosis import Finding, Level
from headwater.sources.open import diagnose

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
