"""The doctor: whether a deployment can be captured, what could stop it later, and the command that mends each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pymongo.errors import OperationFailure

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceMisconfigured, SourceNotFound, UnsupportedTable
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Client, Dsn, connect, server_errors
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.server import NO_REPLICA_SET, Server
from headwater.sources.mongodb.watch import now

SHORT_OPLOG_HOURS: Final = 24.0
SHORT_HISTORY_SECONDS: Final = 60


def examine(dsn: Dsn, tables: Sequence[str] = ()) -> Diagnosis:
    """Look at the deployment and at *tables*; at every collection where none is named. Nothing is changed.

    :raises InputError: a text is no name of a collection.
    """
    names = [CollectionName.parse(text, dsn.database) for text in tables]
    client = connect(dsn)
    try:
        with server_errors(dsn):
            server = Server.ask(client, dsn)
            findings = [
                Finding("connection", Level.OK, f"{dsn} answers."),
                Finding("version", Level.OK, f"MongoDB {server.version}."),
                _kind(server),
            ]
            findings += _rights(dsn, client, names)
            findings += _oplog(client, server)
            findings += _history(client, server)
            findings += _tables(dsn, client, names)
    except SourceMisconfigured as error:
        fix = f"-- {NO_REPLICA_SET}" if error.next_step == NO_REPLICA_SET else statement_of(error.next_step)
        return Diagnosis(str(dsn), None, [Finding("server", Level.PROBLEM, error.message, fix)])
    except SourceError as error:
        return Diagnosis(
            str(dsn), None, [Finding("connection", Level.PROBLEM, error.message, statement_of(error.next_step))]
        )
    finally:
        client.close()
    return Diagnosis(str(dsn), f"MongoDB {server.version}", findings)


def _kind(server: Server) -> Finding:
    if server.is_sharded:
        text = "A sharded cluster: an _id must be unique over all shards, which no server checks."
        return Finding("deployment", Level.NOTE, text)
    return Finding("deployment", Level.OK, f"The replica set {server.set_name}.")


def _rights(dsn: Dsn, client: Client, names: Sequence[CollectionName]) -> Iterator[Finding]:
    spaces = sorted({name.namespace for name in names}) or ([dsn.database] if dsn.database else [])
    try:
        now(dsn, client, spaces)
    except SourceError as error:
        yield Finding("change stream", Level.PROBLEM, error.message, _grant(dsn, spaces))
        return
    yield Finding("change stream", Level.OK, "The user may watch the changes.")


def _grant(dsn: Dsn, spaces: Sequence[str]) -> str:
    role = f'{{role: "read", db: "{spaces[0]}"}}' if len(spaces) == 1 else '{role: "readAnyDatabase", db: "admin"}'
    return f'db.getSiblingDB("admin").grantRolesToUser("{dsn.user or "headwater"}", [{role}])'


def _oplog(client: Client, server: Server) -> Iterator[Finding]:
    """How long changes are kept: a capture that is down for longer has a gap."""
    if server.is_sharded:
        return
    try:
        oplog = client.local["oplog.rs"]
        ends = [oplog.find_one(sort=[("$natural", way)], projection={"ts": 1}) for way in (1, -1)]
        stats = next(iter(oplog.aggregate([{"$collStats": {"storageStats": {}}}])))["storageStats"]
    except OperationFailure:
        text = "The user may not read the oplog: how long changes are kept is not known."
        yield Finding("oplog", Level.NOTE, text, "-- rs.printReplicationInfo() tells, as another user")
        return
    if ends[0] is None or ends[1] is None:
        return
    hours = (ends[1]["ts"].time - ends[0]["ts"].time) / 3600
    share = stats.get("size", 0) / max(1, stats.get("maxSize", 1))
    if share < 0.9:
        text = f"The oplog is {share:.0%} full; it has {hours:.1f} hours of changes so far."
        yield Finding("oplog", Level.OK, text)
    elif hours < SHORT_OPLOG_HOURS:
        size = 2 * int(stats.get("maxSize", 0)) >> 20
        text = f"The oplog keeps {hours:.1f} hours of changes: a capture that is down for longer has a gap."
        fix = f"db.adminCommand({{replSetResizeOplog: 1, size: {size}, minRetentionHours: 48}})"
        yield Finding("oplog", Level.WARNING, text, fix)
    else:
        yield Finding("oplog", Level.OK, f"The oplog keeps {hours:.0f} hours of changes.")


def _history(client: Client, server: Server) -> Iterator[Finding]:
    """How long a snapshot can be read at."""
    name = "minSnapshotHistoryWindowInSeconds"
    if server.is_sharded:
        return
    try:
        seconds = int(client.admin.command({"getParameter": 1, name: 1})[name])
    except (OperationFailure, KeyError):
        return
    if seconds < SHORT_HISTORY_SECONDS:
        text = f"A snapshot can be read for {seconds} s: what is read later must be planned anew."
        yield Finding("snapshots", Level.WARNING, text, f"db.adminCommand({{setParameter: 1, {name}: 300}})")
    else:
        yield Finding("snapshots", Level.OK, f"A snapshot can be read for {seconds} s.")


def _tables(dsn: Dsn, client: Client, names: Sequence[CollectionName]) -> Iterator[Finding]:
    if not names:
        yield from _summary(client, catalog.all_collections(client, dsn.database))
        return
    found = []
    for name in names:
        try:
            collection = catalog.find(client, name)
        except SourceNotFound as error:
            yield Finding("table", Level.PROBLEM, error.message, statement_of(error.next_step), str(name))
            continue
        except OperationFailure:
            fix = _grant(dsn, [name.namespace])
            yield Finding("table", Level.PROBLEM, "The user may not look at its database.", fix, str(name))
            continue
        found.append(collection)
        yield from _table(client, collection)
    yield from _images(found)


def _table(client: Client, collection: catalog.Collection) -> Iterator[Finding]:
    name = str(collection.name)
    try:
        catalog.require_capturable(client, collection)
    except UnsupportedTable as error:
        yield Finding("table", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
        return
    yield Finding("table", Level.OK, "Its changes are logged; its documents are named by _id.", None, name)


def _images(collections: Sequence[catalog.Collection]) -> Iterator[Finding]:
    """Post-images are used where all captured collections have them."""
    for one in collections:
        if not one.has_images and one.kind == "collection":
            text = (
                "The server keeps no images of its changes: an update is told with the document of a moment later, and"
                " a delete with its key alone."
            )
            fix = (
                f'db.getSiblingDB("{one.name.namespace}").runCommand({{collMod: "{one.name.name}",'
                " changeStreamPreAndPostImages: {enabled: true}})"
            )
            yield Finding("images", Level.NOTE, text, fix, str(one.name))


def _summary(client: Client, collections: Sequence[catalog.Collection]) -> Iterator[Finding]:
    """Of all collections, only those that need something."""
    problems = [finding for one in collections for finding in _table(client, one) if finding.level is Level.PROBLEM]
    fine = len(collections) - len(problems)
    yield Finding("tables", Level.OK, f"{fine} of {len(collections)} collections can be captured.")
    for finding in problems:
        yield Finding(finding.check, Level.WARNING, finding.text, finding.fix, finding.table)
