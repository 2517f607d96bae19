"""The doctor of MongoDB: what is missing, and the command that mends it."""

from __future__ import annotations

import json

from tests.db.mongodb.delivering import TABLE, create
from tests.servers.mongodb import MongoServer
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.sources.diagnosis import Diagnosis, Finding, Level
from headwater.sources.mongodb.connection import Dsn
from headwater.sources.mongodb.doctor import examine


def finding(diagnosis: Diagnosis, check: str) -> Finding:
    return next(one for one in diagnosis.findings if one.check == check)


def test_a_deployment_that_is_set_up_is_healthy(server: MongoServer) -> None:
    create(server, 1)
    diagnosis = examine(Dsn(server.dsn), [TABLE])
    assert diagnosis.is_healthy, diagnosis.findings
    assert str(diagnosis.version).startswith("MongoDB 8")
    for check in ("change stream", "oplog", "snapshots", "table"):
        assert finding(diagnosis, check).level is Level.OK, check
    images = finding(diagnosis, "images")
    assert images.level is Level.NOTE
    server.client.shop.command({"collMod": "orders", "changeStreamPreAndPostImages": {"enabled": True}})
    assert all(one.check != "images" for one in examine(Dsn(server.dsn), [TABLE]).findings)


def test_what_cannot_be_captured_and_what_is_short_is_named(server: MongoServer) -> None:
    create(server, 1)
    server.client.shop.create_collection("seen", viewOn="orders")
    server.client.admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 5})
    try:
        diagnosis = examine(Dsn(server.dsn), ["shop.seen", "shop.order"])
    finally:
        server.client.admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 300})
    assert "setParameter" in str(finding(diagnosis, "snapshots").fix)
    problems = {one.table: one for one in diagnosis.findings if one.level is Level.PROBLEM}
    assert "view" in problems["shop.seen"].text
    assert "shop.orders" in str(problems["shop.order"].fix)
    summary = finding(examine(Dsn(f"{server.address('headwater', server.password, 'shop')}")), "tables")
    assert summary.text == "1 of 2 collections can be captured."


def test_rights_that_are_missing_come_with_their_grant(server: MongoServer) -> None:
    create(server, 1)
    server.client.admin.command({"createUser": "weak", "pwd": "weak password", "roles": []})
    try:
        diagnosis = examine(Dsn(server.address("weak", "weak%20password")), [TABLE])
    finally:
        server.client.admin.command({"dropUser": "weak"})
    assert not diagnosis.is_healthy
    assert 'grantRolesToUser("weak", [{role: "read", db: "shop"}])' in json.dumps(diagnosis.to_json()).replace("\\", "")
    assert "weak password" not in json.dumps(diagnosis.to_json())


def test_the_command_says_the_same_and_ends_with_1_where_there_is_a_problem(server: MongoServer) -> None:
    ran = CliRunner().invoke(app, ["doctor", server.dsn, "--table", "shop.nothing", "--json"])
    assert ran.exit_code == 1
    assert server.password not in ran.output
    nobody = CliRunner().invoke(app, ["doctor", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200", "--json"])
    assert nobody.exit_code == 1
    assert "cannot be reached" in nobody.output
