"""The doctor of MariaDB and MySQL: what is missing, and the statement that mends it."""

from __future__ import annotations

import json

from tests.servers.mariadb import MariaDbServer
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.sources.diagnosis import Diagnosis, Finding, Level
from headwater.sources.mysql.connection import Dsn
from headwater.sources.mysql.doctor import examine


def finding(diagnosis: Diagnosis, check: str) -> Finding:
    return next(one for one in diagnosis.findings if one.check == check)


def test_a_server_that_is_set_up_is_healthy(server: MariaDbServer) -> None:
    server.execute("CREATE TABLE shop.t (id int PRIMARY KEY, f tinyint(1))")
    diagnosis = examine(Dsn(server.dsn), ["shop.t"])
    assert diagnosis.is_healthy, diagnosis.findings
    assert str(diagnosis.version).startswith(server.kind)
    assert finding(diagnosis, "gtid").level is Level.OK
    assert finding(diagnosis, "tinyint(1)").level is Level.NOTE


def test_settings_that_are_wrong_come_with_their_statements(mariadb: MariaDbServer) -> None:
    wrong = {"binlog_format": "MIXED", "binlog_row_image": "MINIMAL", "binlog_row_metadata": "NO_LOG"}
    right = {"binlog_format": "ROW", "binlog_row_image": "FULL", "binlog_row_metadata": "FULL"}
    mariadb.execute(*(f"SET GLOBAL {name} = {value}" for name, value in wrong.items()))
    try:
        diagnosis = examine(Dsn(mariadb.dsn))
    finally:
        mariadb.execute(*(f"SET GLOBAL {name} = {value}" for name, value in right.items()))
    for name, value in right.items():
        assert finding(diagnosis, name).level is Level.PROBLEM
        assert f"SET GLOBAL {name} = {value};" in str(finding(diagnosis, name).fix)


def test_rights_that_are_missing_come_with_their_grants(server: MariaDbServer) -> None:
    server.execute(
        "CREATE TABLE shop.t (id int PRIMARY KEY)",
        "CREATE USER weak@'%' IDENTIFIED BY 'weak password'",
        "GRANT SELECT ON shop.* TO weak@'%'",
    )
    try:
        dsn = Dsn(f"mysql://weak:weak%20password@127.0.0.1:{server.port}/shop")
        diagnosis = examine(dsn, ["t"])
    finally:
        server.execute("DROP USER weak@'%'")
    assert not diagnosis.is_healthy
    assert "GRANT REPLICATION SLAVE ON *.* TO 'weak'@'%';" in str(finding(diagnosis, "replication").fix)
    assert finding(diagnosis, "position").level is Level.PROBLEM
    assert "weak password" not in json.dumps(diagnosis.to_json())


def test_tables_that_cannot_be_captured_are_named(server: MariaDbServer) -> None:
    server.execute(
        "CREATE TABLE shop.heap (a int)",
        "CREATE TABLE shop.parent (id int PRIMARY KEY)",
        "CREATE TABLE shop.child (id int PRIMARY KEY, p int, FOREIGN KEY (p) REFERENCES shop.parent (id) "
        "ON DELETE CASCADE)",
    )
    diagnosis = examine(Dsn(server.dsn), ["shop.heap", "shop.none", "shop.child"])
    problems = {one.table: one for one in diagnosis.findings if one.level is Level.PROBLEM}
    assert "ADD PRIMARY KEY" in str(problems["shop.heap"].fix)
    assert "shop.none" in problems
    warned = [one.table for one in diagnosis.findings if one.check == "cascades"]
    assert warned == (["shop.child"] if server.kind == "MariaDB" else [])
    summary = examine(Dsn(f"{server.dsn}shop"))
    assert finding(summary, "tables").text == "2 of 3 tables can be captured."


def test_the_command_says_the_same_and_ends_with_1_where_there_is_a_problem(mariadb: MariaDbServer) -> None:
    mariadb.execute("CREATE TABLE shop.heap (a int)")
    ran = CliRunner().invoke(app, ["doctor", mariadb.dsn, "--table", "shop.heap", "--json"])
    assert ran.exit_code == 1
    assert mariadb.password not in ran.output
    told = json.loads(ran.output)
    assert told["healthy"] is False
    unreachable = CliRunner().invoke(app, ["doctor", "mysql://nobody:secret@127.0.0.1:1/x", "--json"])
    assert unreachable.exit_code == 1
    assert "secret" not in unreachable.output
