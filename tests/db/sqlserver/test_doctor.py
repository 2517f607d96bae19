"""The doctor of SQL Server: every finding is one of the double's, and its statement mends it there."""

from __future__ import annotations

import subprocess
import sys

from tests.db.sqlserver.running import TABLE, create
from tests.servers.sqlserver import AnySqlServer, track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.diagnosis import Diagnosis, Finding, Level
from headwater.sources.open import diagnose


def examined(dsn: str, *tables: str) -> Diagnosis:
    return diagnose(dsn, tables, slot="", publication="")


def found(diagnosis: Diagnosis, check: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.check == check]
    return finding


def test_a_database_that_can_be_captured_is_healthy(server: AnySqlServer) -> None:
    create(server)
    diagnosis = examined(server.dsn, TABLE)
    assert diagnosis.is_healthy
    assert found(diagnosis, "isolation").level is Level.OK
    assert found(diagnosis, "table").level is Level.OK
    assert diagnosis.version is not None
    assert diagnosis.version.startswith("SQL Server")


def test_what_is_off_is_switched_on_by_its_statements(double: SqlServerDouble) -> None:
    double.engine.has_cdc = False
    double.engine.allows_snapshots = False
    double.execute("CREATE TABLE shop.orders (id int NOT NULL PRIMARY KEY)")
    sick = examined(double.dsn, TABLE)
    assert not sick.is_healthy
    assert found(sick, "change data capture").level is Level.PROBLEM
    assert found(sick, "isolation").level is Level.WARNING
    for finding in sick.findings:
        if finding.fix is not None:
            double.execute(finding.fix)
    healthy = examined(double.dsn, TABLE)
    assert healthy.is_healthy
    assert found(healthy, "isolation").level is Level.OK


def test_an_agent_that_does_not_run_is_a_problem(double: SqlServerDouble) -> None:
    create(double)
    double.engine.agent_runs = False
    finding = found(examined(double.dsn, TABLE), "agent")
    assert finding.level is Level.PROBLEM
    assert finding.fix is not None
    assert "xp_servicecontrol" in finding.fix


def test_a_column_that_is_not_captured_is_a_warning_and_its_statement_captures_it(server: AnySqlServer) -> None:
    create(server)
    server.execute("ALTER TABLE shop.orders ADD rate int")
    finding = found(examined(server.dsn, TABLE), "columns")
    assert finding.level is Level.WARNING
    assert finding.fix is not None
    server.execute(finding.fix)
    assert not [one for one in examined(server.dsn, TABLE).findings if one.check == "columns"]


def test_a_user_who_may_not_see_the_log_is_told_what_to_grant(double: SqlServerDouble) -> None:
    create(double)
    finding = found(examined(double.dsn_of("plain"), TABLE), "log")
    assert finding.level is Level.PROBLEM
    assert finding.fix == "GRANT VIEW DATABASE STATE TO [plain];"


def test_all_tables_are_summed_up(server: AnySqlServer) -> None:
    create(server)
    server.execute("CREATE TABLE shop.keyless (name nvarchar(9))")
    diagnosis = examined(server.dsn)
    assert found(diagnosis, "tables").text.startswith("1 of ")
    assert found(diagnosis, "table").table == "shop.keyless"


def test_the_command_tells_it(double: SqlServerDouble) -> None:
    create(double)
    told = subprocess.run(
        [sys.executable, "-m", "headwater.cli.main", "doctor", double.dsn, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    assert '"healthy": true' in told.stdout or '"healthy":true' in told.stdout
    assert "cret" not in told.stdout + told.stderr


def test_a_server_that_is_too_old_and_a_level_that_is_too_low_are_problems(double: SqlServerDouble) -> None:
    double.engine.version = "13.0.4001.0"
    assert "too old" in found(examined(double.dsn), "version").text
    double.engine.version, double.engine.level = "13.0.5026.0", 120
    finding = found(examined(double.dsn), "version")
    assert finding.fix == "ALTER DATABASE [shop] SET COMPATIBILITY_LEVEL = 130;"
    double.engine.level = 130
    assert found(examined(double.dsn), "version").level is Level.OK


def test_a_user_who_may_not_read_changes_is_told_what_to_grant(double: SqlServerDouble) -> None:
    create(double)
    double.inject("cdc.captured_columns", 229)
    finding = found(examined(double.dsn, TABLE), "rights")
    assert finding.level is Level.PROBLEM
    assert finding.fix == "GRANT SELECT ON SCHEMA::cdc TO [sa];"
    double.engine.is_gated = True
    assert found(examined(double.dsn, TABLE), "rights").fix == "ALTER ROLE [readers] ADD MEMBER [sa];"


def test_a_user_who_may_not_see_the_capture_job_is_told_what_to_grant(double: SqlServerDouble) -> None:
    create(double)
    finding = found(examined(double.dsn_of("plain"), TABLE), "capture job runs")
    assert finding.level is Level.PROBLEM
    assert finding.fix == "GRANT VIEW DATABASE STATE TO [plain];"


def test_the_longest_value_that_can_be_written_is_noted(double: SqlServerDouble) -> None:
    create(double)
    finding = found(examined(double.dsn, TABLE), "long values")
    assert finding.level is Level.NOTE
    assert "65536" in finding.text


def test_a_third_instance_is_advised_only_with_the_removal_of_the_oldest(double: SqlServerDouble) -> None:
    create(double)
    double.execute("ALTER TABLE shop.orders ADD rate int")
    track(double, "orders", instance="second")
    double.execute("ALTER TABLE shop.orders ADD more int")
    finding = found(examined(double.dsn, TABLE), "columns")
    assert finding.fix is not None
    double.execute(*finding.fix.rstrip(";").split("; "))
    assert sorted(one.name for one in double.engine.instances) == ["second", "shop_orders_more"]


def test_a_job_that_looks_too_rarely_is_a_problem(double: SqlServerDouble) -> None:
    create(double)
    for seconds, level in ((1, Level.OK), (5, Level.NOTE), (31, Level.PROBLEM)):
        double.engine.polls = seconds
        assert found(examined(double.dsn, TABLE), "capture job").level is level


def test_what_holds_the_capture_job_back_is_told(double: SqlServerDouble) -> None:
    create(double)
    double.engine.hardened = double.engine.log_end
    assert found(examined(double.dsn, TABLE), "replicas").level is Level.NOTE
    finding = found(examined(double.dsn_of("reader"), TABLE), "replicas")
    assert finding.level is Level.PROBLEM
    assert finding.fix is not None
    assert finding.fix.startswith("GRANT VIEW SERVER STATE TO [reader];")
    double.engine.waits_for_backup = True
    assert found(examined(double.dsn, TABLE), "log held back").level is Level.PROBLEM


def test_values_and_rows_that_the_user_does_not_see_as_they_are_are_told(double: SqlServerDouble) -> None:
    create(double)
    double.engine.masked["orders"] = "note"
    finding = found(examined(double.dsn_of("reader"), TABLE), "masked columns")
    assert finding.level is Level.PROBLEM
    assert finding.fix == "GRANT UNMASK TO [reader];"
    double.engine.policies["orders"], double.engine.switched = "by_tenant", {"orders"}
    diagnosis = examined(double.dsn, TABLE)
    assert not [one for one in diagnosis.findings if one.check == "masked columns"]  # its user may see them
    assert "by_tenant" in found(diagnosis, "row-level security").text
    finding = found(diagnosis, "partitions")
    assert finding.fix is not None
    assert "@allow_partition_switch = 0;" in finding.fix
    assert found(examined(double.dsn), "partitions").level is Level.WARNING
