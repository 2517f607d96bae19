"""The doctor: whether a server can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceNotFound, UnsupportedTable
from headwater.sources.mysql.catalog import CatalogTable, all_table_names, cascades, read_table, read_tables
from headwater.sources.mysql.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.mysql.names import TableName, quoted
from headwater.sources.mysql.server import Server, binlog_files, log_position
from headwater.sources.mysql.types import MySqlType

FEW_CONNECTIONS: Final = 3
SHORT_RETENTION: Final = 24 * 3600

_NEEDED: Final = (
    ("binlog_format", "ROW", "The log tells statements, not rows"),
    ("binlog_row_image", "FULL", "The log does not tell all columns of a row"),
    ("binlog_row_metadata", "FULL", "The log does not tell the names of columns"),
)


def setting_problems(server: Server) -> Iterator[Finding]:
    """Settings without which nothing can be captured."""
    if server.settings.get("log_bin") != "ON":
        fix = "-- in the server's configuration: log_bin = binlog, server_id = 1; then restart it"
        yield Finding("log_bin", Level.PROBLEM, "The server writes no log of its changes: log_bin is OFF.", fix)
        return
    for name, wanted, what in _NEEDED:
        found = server.settings.get(name, "not there")
        if found != wanted:
            yield Finding(name, Level.PROBLEM, f"{what}: {name} is {found}.", set_setting(server, name, wanted))
    if server.settings.get("binlog_alter_two_phase") == "ON":
        text = "ALTER TABLE is logged before rows of the old shape end: binlog_alter_two_phase is ON."
        fix = set_setting(server, "binlog_alter_two_phase", "OFF")
        yield Finding("binlog_alter_two_phase", Level.PROBLEM, text, fix)


def set_setting(server: Server, name: str, value: str) -> str:
    """The statement that changes a setting for sessions that begin after it."""
    if server.version.is_mariadb:
        return f"SET GLOBAL {name} = {value}; -- and in the server's configuration; sessions that are open keep theirs"
    return f"SET PERSIST {name} = {value}; -- sessions that are open keep theirs"


def check_server(session: Connection, server: Server) -> Iterator[Finding]:
    """All findings about the server, in the order in which they matter."""
    yield Finding("version", Level.OK, f"{server.version}.")
    problems = list(setting_problems(server))
    yield from problems
    if not problems:
        yield Finding("log", Level.OK, "The log tells whole rows and the names of their columns.")
    yield from _rights(session, server)
    if server.settings.get("log_bin") == "ON":
        yield from _numbers(server)
        yield from _replica(session, server)
        yield from _retention(session, server)
    yield from _connections(session, server)


def _rights(session: Connection, server: Server) -> Iterator[Finding]:
    user = str(ask(session, "SELECT CURRENT_USER() AS name")[0]["name"])
    account = "@".join(f"'{part}'" for part in user.rsplit("@", 1))
    grants = " ".join(str(next(iter(row.values()))).upper() for row in ask(session, "SHOW GRANTS"))
    everything = "ALL PRIVILEGES ON *.*" in grants
    if everything or "REPLICATION SLAVE" in grants or "REPLICATION REPLICA" in grants:
        yield Finding("replication", Level.OK, f"The user {user} may read the log.")
    else:
        fix = f"GRANT REPLICATION SLAVE ON *.* TO {account};"
        yield Finding("replication", Level.PROBLEM, f"The user {user} may not read the log.", fix)
    needs_process = not server.version.is_mariadb and not server.numbers_transactions
    if needs_process and not everything and not re.search(r"\bPROCESS\b", grants):
        text = (
            f"The user {user} may not see who commits just now, and transactions have no numbers: history could miss a"
            " commit that takes longer than half a second."
        )
        yield Finding("commits", Level.WARNING, text, f"GRANT PROCESS ON *.* TO {account};")
    try:
        log_position(session, server)
        binlog_files(session)
        yield Finding("position", Level.OK, "The user may ask how far the log is.")
    except SourceError as error:
        yield Finding("position", Level.PROBLEM, error.message, None)
    except Exception as error:  # the library's own, with the server's text
        right = "BINLOG MONITOR" if server.version.is_mariadb else "REPLICATION CLIENT"
        text = f"The user {user} may not ask how far the log is: {type(error).__name__}."
        yield Finding("position", Level.PROBLEM, text, f"GRANT {right} ON *.* TO {account};")


def _numbers(server: Server) -> Iterator[Finding]:
    """Whether another server can take over."""
    if server.version.is_mariadb:
        if server.settings.get("gtid_strict_mode") == "ON":
            yield Finding("gtid", Level.OK, "Transactions are numbered: another server can take over.")
        else:
            text = "Transactions are numbered, and nothing keeps two servers from writing into one domain."
            yield Finding("gtid", Level.NOTE, text, set_setting(server, "gtid_strict_mode", "ON"))
    elif server.numbers_transactions:
        yield Finding("gtid", Level.OK, "Transactions are numbered: another server can take over.")
    else:
        text = (
            f"gtid_mode is {server.settings.get('gtid_mode')}: when another server takes over, everything is read "
            "once more."
        )
        fix = (
            "SET PERSIST enforce_gtid_consistency = ON; SET PERSIST gtid_mode = OFF_PERMISSIVE; "
            "SET PERSIST gtid_mode = ON_PERMISSIVE; SET PERSIST gtid_mode = ON; -- before the first capture"
        )
        yield Finding("gtid", Level.WARNING, text, fix)


def _replica(session: Connection, server: Server) -> Iterator[Finding]:
    logs_updates = server.settings.get("log_replica_updates", server.settings.get("log_slave_updates"))
    words = "SHOW REPLICA STATUS" if server.version.number >= (8, 0, 22) else "SHOW SLAVE STATUS"
    try:
        is_replica = bool(ask(session, words))
    except Exception:  # no right to ask
        return
    if is_replica and logs_updates != "ON":
        text = "This is a replica that does not log what it replicates (log_slave_updates)."
        fix = "-- in the server's configuration: log_slave_updates = ON; then restart it; or give the primary's address"
        yield Finding("replica", Level.PROBLEM, text, fix)
    elif is_replica:
        yield Finding("replica", Level.NOTE, "This is a replica: changes come as late as they come here.")


def _retention(session: Connection, server: Server) -> Iterator[Finding]:
    """How long a stopped capture may stay stopped."""
    seconds = int(server.settings.get("binlog_expire_logs_seconds") or 0)
    if not seconds:
        seconds = int(float(server.settings.get("expire_logs_days") or 0) * 86400)
    if not seconds:
        yield Finding("retention", Level.OK, "The server keeps its log until somebody removes it.")
        return
    text = f"The server keeps its log for {seconds / 3600:.0f} hours: a capture may stop for that long."
    if seconds < SHORT_RETENTION:
        fix = set_setting(server, "binlog_expire_logs_seconds", "604800")
        yield Finding("retention", Level.WARNING, text, fix)
    else:
        yield Finding("retention", Level.OK, text)


def _connections(session: Connection, server: Server) -> Iterator[Finding]:
    most = int(server.settings.get("max_connections") or 0)
    rows = ask(session, "SHOW GLOBAL STATUS LIKE 'Threads_connected'")
    left = most - int(rows[0]["value"]) if rows else most
    if left < FEW_CONNECTIONS:
        fix = set_setting(server, "max_connections", str(most + 20))
        yield Finding("connections", Level.WARNING, f"Only {max(left, 0)} more connections fit.", fix)
    else:
        yield Finding("connections", Level.OK, f"{left} more connections fit.")


def examine(dsn: Dsn, tables: Sequence[str] = ()) -> Diagnosis:
    """Look at the server and at *tables*; at every table where none is named. Nothing is changed.

    :raises InputError: a text is no table name.
    """
    names = [TableName.parse(text, dsn.database) for text in tables]
    try:
        session = connect(dsn)
    except SourceError as error:
        return Diagnosis(
            str(dsn), None, [Finding("connection", Level.PROBLEM, error.message, statement_of(error.next_step))]
        )
    try:
        with server_errors(dsn):
            findings = [Finding("connection", Level.OK, f"{dsn} answers.")]
            server = Server.ask(session)
            findings += check_server(session, server)
            findings += _tables(session, dsn, server, names)
    finally:
        session.close()
    return Diagnosis(str(dsn), str(server.version), findings)


def _tables(session: Connection, dsn: Dsn, server: Server, names: Sequence[TableName]) -> Iterator[Finding]:
    if not names:
        yield from _summary(read_tables(session, all_table_names(session, dsn.database)))
        return
    for name in names:
        try:
            yield from _table(read_table(session, name))
            if not server.logs_cascades:
                yield from _cascades(session, name)
        except SourceNotFound as error:
            yield Finding("table", Level.PROBLEM, error.message, statement_of(error.next_step), str(name))


def _table(table: CatalogTable) -> Iterator[Finding]:
    name = str(table.name)
    try:
        table.require_capturable()
    except UnsupportedTable as error:
        yield Finding("table", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
        return
    index = "its primary key" if table.key_index.upper() == "PRIMARY" else f"the unique index {table.key_index}"
    yield Finding("table", Level.OK, f"Its rows are named by {index}: {', '.join(table.key)}.", None, name)
    if table.engine.upper() not in ("INNODB", "ROCKSDB", "XTRADB"):
        text = f"The engine {table.engine} has no transactions: a statement that fails half way is logged half."
        yield Finding("engine", Level.NOTE, text, f"ALTER TABLE {table.name.sql} ENGINE = InnoDB;", name)
    booleans = [column.name for column in table.columns if MySqlType.parse(column.type_text).is_tinyint1]
    if booleans:
        text = f"Numbers, not booleans: {', '.join(booleans)}. For booleans write ?tinyint1=boolean in the address."
        yield Finding("tinyint(1)", Level.NOTE, text, None, name)


def _cascades(session: Connection, name: TableName) -> Iterator[Finding]:
    for key in cascades(session, name):
        text = f"Rows that change through the foreign key {key} (CASCADE, SET NULL) are not in this server's log."
        fix = (
            f"ALTER TABLE {name.sql} DROP FOREIGN KEY {quoted(key)}, ADD FOREIGN KEY (…) REFERENCES … (…); -- RESTRICT"
        )
        yield Finding("cascades", Level.WARNING, text, fix, str(name))


def _summary(tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    """Of all tables, only those that need something."""
    problems = [finding for table in tables for finding in _table(table) if finding.level is Level.PROBLEM]
    fine = len(tables) - len(problems)
    yield Finding("tables", Level.OK, f"{fine} of {len(tables)} tables can be captured.")
    for finding in problems:
        yield Finding(finding.check, Level.WARNING, finding.text, finding.fix, finding.table)
