"""The doctor, on each version: every finding is a real state of a real server, and its statement mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.servers.postgres import VERSIONS, Database, PostgresServer
from tests.servers.proxy import PoolerProxy
from typer.testing import CliRunner, Result

from headwater.cli.main import app
from headwater.sources.diagnosis import Diagnosis, Finding, Level
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.postgres import server_checks
from headwater.sources.postgres.connection import Dsn, connect, connect_replication
from headwater.sources.postgres.doctor import examine
from headwater.sources.postgres.slot import create_slot

StartPostgres = Callable[..., PostgresServer]
each_version = pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{version}" for version in VERSIONS])


def doctor(database: Database, *tables: str, dsn: str | None = None, slot: str = "headwater") -> Diagnosis:
    return examine(Dsn(dsn or database.dsn), tables, slot=slot)


def one(diagnosis: Diagnosis, check: str, table: str | None = None) -> Finding:
    found = [finding for finding in diagnosis.findings if finding.check == check and finding.table in (table, None)]
    assert len(found) == 1, [finding.text for finding in diagnosis.findings]
    return found[0]


def level(diagnosis: Diagnosis, check: str, table: str | None = None) -> Level:
    return one(diagnosis, check, table).level


def apply(database: Database, finding: Finding) -> None:
    """Run the statement of a finding, as a person would paste it."""
    assert finding.fix is not None
    statements = [part.strip() for part in finding.fix.split(";")]
    database.execute(*[part for part in statements if part and not part.startswith("--")])


def write_log(database: Database, megabytes: int) -> None:
    database.execute(
        f"SELECT pg_logical_emit_message(false, 'fill', repeat('x', {megabytes} * 1000 * 1000))",
        "SELECT pg_switch_wal()",
        "CHECKPOINT",
    )


def test_a_database_that_is_ready_has_no_problem(postgres: Database) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY, n int)", "CREATE TABLE log (at timestamptz)")
    found = doctor(postgres, "orders")
    assert found.is_healthy
    assert found.version is not None
    assert found.version.startswith(str(postgres.server.major))
    assert {finding.level for finding in found.findings} <= {Level.OK, Level.NOTE}
    assert one(found, "table", "public.orders").text == "It can be captured; its key is (id)."
    every = doctor(postgres)
    assert every.is_healthy
    assert one(every, "tables").text == "1 of 2 tables can be captured."
    assert level(every, "replica identity", "public.log") is Level.WARNING


@each_version
def test_settings_that_need_a_restart(start_postgres: StartPostgres, major: int) -> None:
    settings = {"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1", "max_connections": "8"}
    server = start_postgres(major, settings)
    with server.database() as database:
        database.execute("SELECT pg_create_physical_replication_slot('standby', true)")
        sessions = [database.connect() for _ in range(4)]
        found = doctor(database)
        assert not found.is_healthy
        assert level(found, "slots") is Level.PROBLEM
        assert level(found, "connections") is Level.WARNING
        for check in ("wal_level", "slots", "connections"):
            apply(database, one(found, check))
        for session in sessions:
            session.close()
        for name in settings:
            del server.settings[name]
        server.restart()
        found = doctor(database)
        assert found.is_healthy
        for check in ("wal_level", "slots", "connections"):
            assert level(found, check) is Level.OK
        database.execute("SELECT pg_drop_replication_slot('standby')")


@each_version
def test_no_wal_sender_is_left(start_postgres: StartPostgres, major: int) -> None:
    server = start_postgres(major, {"max_wal_senders": "0"})
    with server.database() as database:
        found = doctor(database)
        assert level(found, "senders") is Level.PROBLEM
        assert level(found, "replication") is Level.PROBLEM
        apply(database, one(found, "senders"))
        del server.settings["max_wal_senders"]
        server.restart()
        assert level(doctor(database), "senders") is Level.OK


@each_version
def test_settings_that_need_a_reload(start_postgres: StartPostgres, major: int) -> None:
    server = start_postgres(major)
    with server.database() as database:
        before = doctor(database)
        assert level(before, "retention") is Level.NOTE
        unwanted = {"max_slot_wal_keep_size": "100MB", "wal_sender_timeout": "0"}
        expected = {"retention": Level.WARNING, "sender timeout": Level.WARNING}
        if major >= 18:
            unwanted |= {"idle_replication_slot_timeout": "1d"}
            expected |= {"idle timeout": Level.WARNING}
        if "plugin" in {finding.check for finding in before.findings}:
            unwanted |= {"output_plugin_libraries": "test_decoding"}
            expected |= {"plugin": Level.PROBLEM}
        server.reload(**unwanted)
        found = doctor(database)
        for check, wanted in expected.items():
            assert level(found, check) is wanted
            apply(database, one(found, check))
        server.reload()
        checks = {finding.check: finding.level for finding in doctor(database).findings}
        assert all(checks.get(check, Level.OK) is Level.OK for check in expected)
        server.reload(wal_sender_timeout="1s")
        assert level(doctor(database), "sender timeout") is Level.WARNING
    if major >= 18:
        assert "plugin" in expected


def test_a_limited_user_is_told_every_grant_and_they_suffice(postgres: Database) -> None:
    role = postgres.role("reader")
    postgres.execute(
        'CREATE SCHEMA "Sales"',
        'CREATE TABLE "Sales"."Orders" (id int PRIMARY KEY)',
        "CREATE TABLE policed (id int PRIMARY KEY)",
        "ALTER TABLE policed ENABLE ROW LEVEL SECURITY",
    )
    names, dsn = ('"Sales"."Orders"', "policed"), postgres.dsn_of(role)
    found = doctor(postgres, *names, dsn=dsn)
    problems = {(finding.check, finding.table) for finding in found.findings if finding.level is Level.PROBLEM}
    assert problems == {
        ("replication", None),
        ("publication", None),
        ("grants", '"Sales"."Orders"'),
        ("grants", "public.policed"),
        ("row security", "public.policed"),
    }
    assert level(found, "sight") is Level.NOTE
    for finding in found.findings:
        if finding.level is Level.PROBLEM or finding.check == "sight":
            apply(postgres, finding)
    after = doctor(postgres, *names, dsn=dsn)
    assert after.is_healthy
    assert "sight" not in {finding.check for finding in after.findings}
    assert level(after, "publication") is Level.OK
    postgres.execute("DROP PUBLICATION headwater", f'ALTER TABLE "Sales"."Orders" OWNER TO {role}')
    assert level(doctor(postgres, '"Sales"."Orders"', dsn=dsn), "publication") is Level.PROBLEM
    postgres.execute(f"GRANT CREATE ON DATABASE {postgres.name} TO {role}")
    assert level(doctor(postgres, '"Sales"."Orders"', dsn=dsn), "publication") is Level.OK


def test_tables_each_shape_and_its_statement(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE nokey (a int)",
        "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)",
        "CREATE VIEW v AS SELECT 1 AS a",
        "CREATE TABLE whole (a int)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE computed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, body text)",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (parent)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (10)",
    )
    names = ("nokey", "quick", "v", "whole", "computed", "parent", "root", "leaf", "missing")
    found = doctor(postgres, *names)
    assert level(found, "logging", "public.v") is Level.PROBLEM
    assert level(found, "table", "public.missing") is Level.PROBLEM
    assert level(found, "replica identity", "public.whole") is Level.WARNING
    assert level(found, "inheritance", "public.parent") is Level.NOTE
    assert level(found, "large values", "public.computed") is Level.NOTE
    assert "1 partitions" in one(found, "table", "public.root").text
    partitions = [finding for finding in found.findings if finding.check == "partitions"]
    assert {(finding.level, finding.table) for finding in partitions} == {
        (Level.PROBLEM, "public.leaf"),
        (Level.NOTE, "public.leaf"),
    }
    left_out = [finding for finding in found.findings if finding.check == "generated columns"]
    assert len(left_out) == (0 if postgres.server.major >= 18 else 1)
    for check, table in (("replica identity", "public.nokey"), ("logging", "public.quick")):
        assert level(found, check, table) is Level.PROBLEM
        apply(postgres, one(found, check, table))
    assert doctor(postgres, "nokey", "quick").is_healthy


def test_the_publication_that_is_there(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "CREATE PUBLICATION headwater FOR TABLE a WITH (publish = 'insert')",
    )
    found = doctor(postgres, "a")
    assert level(found, "publication") is Level.PROBLEM
    apply(postgres, one(found, "publication"))
    assert level(doctor(postgres, "a"), "publication") is Level.OK
    assert level(doctor(postgres, "b"), "publication") is Level.NOTE
    dsn = postgres.dsn_of(postgres.role("reader", "REPLICATION"))
    found = doctor(postgres, "b", dsn=dsn)
    assert level(found, "publication") is Level.PROBLEM
    apply(postgres, one(found, "publication"))
    assert level(doctor(postgres, "b", dsn=dsn), "publication") is Level.OK


@each_version
def test_slots_that_hold_the_log_and_slots_that_lost_it(
    start_postgres: StartPostgres, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "MUCH_LOG", 4 << 20)
    settings = {"max_wal_size": "32MB", "min_wal_size": "32MB"}
    server = start_postgres(major, settings)
    with server.database() as database:
        with connect(Dsn(database.dsn)) as session:
            create_slot(session, "headwater")
            create_slot(session, "forgotten")
        assert level(doctor(database), "slot") is Level.OK
        for _ in range(4):
            write_log(database, 16)
        found = doctor(database)
        assert level(found, "slot") is Level.WARNING
        forgotten = one(found, "other slot")
        assert forgotten.level is Level.WARNING
        assert "'forgotten'" in forgotten.text
        assert forgotten.fix is not None
        database.execute(forgotten.fix)
        server.reload(max_slot_wal_keep_size="1MB")
        write_log(database, 16)
        found = doctor(database)
        assert level(found, "slot") is Level.PROBLEM
        assert one(found, "slot").fix == "headwater resnapshot"
        assert level(doctor(database, slot="another"), "other slot") is Level.NOTE


def test_a_slot_of_another_kind_and_a_slot_in_use(postgres: Database) -> None:
    with postgres.server.connect() as elsewhere:
        elsewhere.execute(f"SELECT pg_create_logical_replication_slot('{postgres.name}_x', 'pgoutput')".encode())
        assert level(doctor(postgres, slot=f"{postgres.name}_x"), "slot") is Level.PROBLEM
        elsewhere.execute(f"SELECT pg_drop_replication_slot('{postgres.name}_x')".encode())
    if postgres.server.major >= 17:
        postgres.execute("SELECT pg_create_logical_replication_slot('headwater', 'pgoutput')")
        assert level(doctor(postgres), "failover") is Level.NOTE


def test_transactions_in_the_way(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_OLD_TRANSACTIONS", "_OLD_PREPARED"):
        query: str = getattr(server_checks, name)
        monkeypatch.setattr(server_checks, name, query.replace("'300 seconds'", "'0 seconds'"))
    postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with postgres.connect() as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO t VALUES (1)")
        other.execute("PREPARE TRANSACTION 'it''s one'")
    writer = postgres.connect()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (2)")
    found = [finding for finding in doctor(postgres).findings if finding.check == "transactions"]
    assert [finding.level for finding in found] == [Level.WARNING, Level.WARNING]
    assert str(writer.info.backend_pid) in found[0].text
    for finding in found:
        apply(postgres, finding)
    writer.close()
    assert not [finding for finding in doctor(postgres).findings if finding.check == "transactions"]


@each_version
def test_m29_a_standby(start_postgres: StartPostgres, major: int) -> None:
    server = start_postgres(major)
    with server.database() as database:
        assert level(doctor(database), "primary") is Level.OK
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        found = doctor(database)
        assert level(found, "primary") is (Level.WARNING if major >= 16 else Level.PROBLEM)
        if major >= 16:
            apply(database, one(found, "primary"))
            server.restart()
            assert level(doctor(database), "primary") is Level.NOTE
        database.execute("SELECT pg_promote()")


def test_other_encodings(postgres: Database) -> None:
    for encoding, expected in (("SQL_ASCII", Level.WARNING), ("LATIN1", Level.NOTE)):
        name = f"{postgres.name}_{encoding.lower()}"
        postgres.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'")
        assert level(examine(Dsn(postgres.server.dsn(name))), "encoding") is expected
        postgres.execute(f"DROP DATABASE {name}")


def test_pg_hba_that_keeps_the_user_out(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    with server.database() as database:
        role = database.role("reader", "REPLICATION")
        hba = server.data / "pg_hba.conf"
        hba.write_text(f"host all {role} 127.0.0.1/32 reject\n{hba.read_text()}")
        server.reload()
        found = doctor(database, dsn=database.dsn_of(role))
        assert [finding.check for finding in found.findings] == ["connection"]
        assert level(found, "connection") is Level.PROBLEM
        assert "pg_hba.conf" in str(found.findings[0].fix)


def test_a_pooler_that_lets_sql_through_and_replication_not(newest_postgres: Database) -> None:
    server = newest_postgres.server
    with PoolerProxy("127.0.0.1", server.port) as pooler:
        dsn = newest_postgres.dsn.replace(f":{server.port}/", f":{pooler.port}/")
        with pytest.raises(SourceMisconfigured, match="pooler"):
            connect_replication(Dsn(dsn))
        found = doctor(newest_postgres, dsn=dsn)
    assert level(found, "replication") is Level.PROBLEM
    assert "--poll" in str(one(found, "replication").fix)
    assert level(found, "pooler") is Level.WARNING
    assert "pooler" not in {finding.check for finding in doctor(newest_postgres).findings}


def test_room_on_the_disk_is_told_where_the_server_is_on_this_machine(
    newest_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor(newest_postgres)
    told = {finding.check for finding in found.findings}
    assert "log size" in told
    if os.geteuid() in (0, newest_postgres.server.data.stat().st_uid):
        assert level(found, "disk") in (Level.OK, Level.WARNING)
        monkeypatch.setattr(server_checks, "LITTLE_ROOM", 1.0)
        assert level(doctor(newest_postgres), "disk") is Level.WARNING
    else:
        assert "disk" not in told


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def test_the_command_prints_findings_statements_and_an_exit_code(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE good (id int PRIMARY KEY)", "CREATE TABLE bad (id int)")
    dsn, password = newest_postgres.dsn, newest_postgres.server.password
    good = command(dsn, "--table", "good", "--json")
    assert good.exit_code == 0, good.stderr
    told = json.loads(good.stdout)
    assert told["healthy"] is True
    assert {"check", "level", "table", "text", "fix"} == set(told["findings"][0])
    bad = command(dsn, "--table", "bad")
    assert bad.exit_code == 1
    assert "problem" in bad.stdout
    assert 'ALTER TABLE "public"."bad" REPLICA IDENTITY FULL;' in bad.stdout
    nobody = command(dsn.replace(password, "not-this-one"), "--json")
    assert nobody.exit_code == 1
    assert json.loads(nobody.stdout)["findings"][0]["check"] == "connection"
    for done in (good, bad, nobody):
        assert not any(secret in done.output for secret in (password, "not-this-one"))


@pytest.mark.parametrize(
    "arguments", [["oracle://root:hidden-word@localhost/x"], ["postgresql://u:hidden-word@h/x", "--table", "a.b.c"]]
)
def test_input_that_cannot_be_read_ends_the_command_with_one_line(arguments: list[str]) -> None:
    run = [sys.executable, "-c", "from headwater.cli.main import run; run()", "doctor", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "hidden-word" not in done.stdout + done.stderr
