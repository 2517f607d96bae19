"""What a server tells of itself: who it is, what it logs, and how far its log has come."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pymysql

from headwater.sources.errors import SourceBusy, SourceMisconfigured
from headwater.sources.mysql.connection import Connection, Version, ask, version_of
from headwater.sources.mysql.gtid import Gtids, MariaDbGtids, MySqlGtids
from headwater.sources.mysql.offset import MySqlOffset

_NEW_WORDS: Final = (8, 4, 0)
"""From here on MySQL says BINARY LOG STATUS."""

_MAY_NOT_RECOVER: Final = 1401

SETTINGS: Final = (
    "binlog_alter_two_phase",
    "log_bin",
    "binlog_format",
    "binlog_row_image",
    "binlog_row_metadata",
    "binlog_row_value_options",
    "binlog_expire_logs_seconds",
    "expire_logs_days",
    "binlog_legacy_event_pos",
    "gtid_mode",
    "enforce_gtid_consistency",
    "gtid_strict_mode",
    "log_slave_updates",
    "log_replica_updates",
    "innodb_native_foreign_keys",
    "lower_case_table_names",
    "max_connections",
    "read_only",
    "server_id",
    "server_uid",
    "server_uuid",
    "binlog_transaction_compression",
    "log_bin_compress",
    "net_write_timeout",
    "slave_net_timeout",
    "replica_net_timeout",
)

_MADE: Final = """
SELECT MIN(t.create_time) AS made FROM information_schema.tables t WHERE t.table_schema = 'mysql' AND t.engine = 'Aria'
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A server at the moment in which it was asked.

    :ivar server: its own name for itself: ``server_uuid`` of MySQL, ``server_uid`` of MariaDB, which is made of its
        network address.
    :ivar made: when the tables of a MariaDB were made, where the user may see that: what tells two servers apart that
        have the same ``server_id``.
    :ivar settings: by name, those that it has.
    """

    version: Version
    server: str
    settings: Mapping[str, str]
    made: str | None = None

    @classmethod
    def ask(cls, session: Connection) -> Server:
        names = ", ".join(f"'{name}'" for name in SETTINGS)
        rows = ask(session, f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
        settings = {str(row["variable_name"]): str(row["value"]) for row in rows}
        own = settings.get("server_uuid") or settings.get("server_uid") or f"server_id {settings.get('server_id')}"
        made = ask(session, _MADE)[0]["made"] if version_of(session).is_mariadb else None
        return cls(version_of(session), own, settings, None if made is None else str(made))

    @property
    def numbers_transactions(self) -> bool:
        """Whether every transaction has a number that is the same on all servers."""
        return self.version.is_mariadb or self.settings.get("gtid_mode") == "ON"

    @property
    def logs_cascades(self) -> bool:
        """Whether rows that change through foreign keys are in the log."""
        return not self.version.is_mariadb and self.settings.get("innodb_native_foreign_keys") == "OFF"

    def identity(self) -> dict[str, Any]:
        """What is kept beside a position."""
        identity = {"family": self.version.family, "server": self.server, "made": self.made}
        return identity | {"server_id": self.settings.get("server_id")}


def log_position(session: Connection, server: Server) -> MySqlOffset:
    """Where the server's log ends now.

    :raises SourceMisconfigured: it has no log. :raises SourceBusy: it is being purged.
    """
    words = "MASTER STATUS"
    if not server.version.is_mariadb and server.version.number >= _NEW_WORDS:
        words = "BINARY LOG STATUS"
    rows = ask(session, f"SHOW {words}")
    if not rows:
        raise SourceMisconfigured(
            f"The server writes no log of its changes: log_bin is {server.settings.get('log_bin', 'OFF')}.",
            next_step="Start it with --log-bin and --server-id; then run: headwater doctor",
        )
    gtids: Gtids | None = None
    filename, position = str(rows[0]["file"]), int(rows[0]["position"])
    if server.version.is_mariadb:
        # of this very place in the log: what was committed since is not before it
        told = ask(session, "SELECT BINLOG_GTID_POS(%s, %s) AS gtids", [filename, position])[0]["gtids"]
        if told is None:
            raise SourceBusy(f"The server removed its log file {filename} just now.", next_step="Try again.")
        gtids = MariaDbGtids.parse(str(told))
    elif server.numbers_transactions:
        gtids = MySqlGtids.parse(str(rows[0]["executed_gtid_set"] or ""))
    return MySqlOffset(filename, position, gtids, server.server, moment=time.time_ns() // 1000)


def prepared_transactions(session: Connection) -> set[tuple[str, ...]]:
    """The XA transactions that are prepared and not decided; none where the user may not ask for them (MySQL)."""
    try:
        rows = ask(session, "XA RECOVER")
    except pymysql.err.Error as error:
        if error.args and error.args[0] == _MAY_NOT_RECOVER:
            return set()
        raise
    return {tuple(str(value) for value in row.values()) for row in rows}


def binlog_files(session: Connection) -> dict[str, int]:
    """The binlog files that the server still has, and their sizes."""
    return {str(row["log_name"]): int(row["file_size"]) for row in ask(session, "SHOW BINARY LOGS")}


def purged(session: Connection, server: Server) -> MySqlGtids | None:
    """The transactions that MySQL has executed and logs no longer; ``None`` of MariaDB."""
    if server.version.is_mariadb:
        return None
    return MySqlGtids.parse(str(ask(session, "SELECT @@GLOBAL.gtid_purged AS gtids")[0]["gtids"] or ""))


def executed(session: Connection, server: Server) -> Gtids | None:
    """The transactions that the server has logged; ``None`` where it does not number them."""
    if server.version.is_mariadb:
        return MariaDbGtids.parse(str(ask(session, "SELECT @@GLOBAL.gtid_binlog_pos AS gtids")[0]["gtids"] or ""))
    if server.numbers_transactions:
        return MySqlGtids.parse(str(ask(session, "SELECT @@GLOBAL.gtid_executed AS gtids")[0]["gtids"] or ""))
    return None
