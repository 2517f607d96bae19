"""What the doctor looks at on the server: settings, rights, slots, room and what is in the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwater.sources.diagnosis import Finding, Level
from headwater.sources.errors import AccessDenied, SourceError
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect_replication
from headwater.sources.postgres.names import literal, quoted
from headwater.sources.postgres.slot import PLUGIN, Slot, read_slots
from headwater.system.process import status_fields

OLD_TRANSACTION_SECONDS: Final = 300
MUCH_LOG: Final = 1 << 30
FEW_CONNECTIONS: Final = 3
LITTLE_ROOM: Final = 0.1
SHORT_SENDER_TIMEOUT: Final = 10_000

_RESTART: Final = "-- then restart the server"
_RELOAD: Final = "SELECT pg_reload_conf();"

_ROLE = """
SELECT r.rolreplication OR r.rolsuper
         OR EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'rds_replication'
                    AND pg_catalog.pg_has_role(g.oid, 'MEMBER')) AS may_replicate,
       EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'rds_replication') AS managed,
       pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') AS sees_sessions,
       pg_catalog.has_function_privilege('pg_catalog.pg_ls_waldir()', 'EXECUTE') AS sees_log_files,
       pg_catalog.pg_is_in_recovery() AS standby,
       (SELECT pg_catalog.pg_encoding_to_char(d.encoding) FROM pg_catalog.pg_database d
        WHERE d.datname = pg_catalog.current_database()) AS encoding,
       (SELECT COALESCE(sum(d.numbackends), 0) FROM pg_catalog.pg_stat_database d) AS sessions,
       (SELECT count(*) FROM pg_catalog.pg_stat_replication) AS senders,
       r.rolname AS name
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

_OLD_TRANSACTIONS = f"""
SELECT a.pid, extract(epoch FROM now() - a.xact_start)::bigint AS seconds
FROM pg_catalog.pg_stat_activity a
WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
  AND a.xact_start < now() - interval '{OLD_TRANSACTION_SECONDS} seconds'
ORDER BY a.xact_start LIMIT 5
"""

_OLD_PREPARED = f"""
SELECT x.gid, extract(epoch FROM now() - x.prepared)::bigint AS seconds
FROM pg_catalog.pg_prepared_xacts x
WHERE x.prepared < now() - interval '{OLD_TRANSACTION_SECONDS} seconds'
ORDER BY x.prepared LIMIT 5
"""


@dataclass(frozen=True, slots=True)
class Server:
    """What the checks are made from, asked for once.

    :ivar settings: by name; those that this user may not see are not there.
    """

    dsn: Dsn
    session: Connection
    version: int
    settings: Mapping[str, str]
    role: Any
    slots: list[Slot]
    slot: str

    @classmethod
    def ask(cls, dsn: Dsn, session: Connection, slot: str) -> Server:
        settings = {row.name: row.setting for row in ask(session, "SELECT name, setting FROM pg_catalog.pg_settings")}
        role = ask(session, _ROLE)[0]
        return cls(dsn, session, session.info.server_version, settings, role, read_slots(session), slot)

    def number(self, name: str) -> int:
        return int(self.settings.get(name, "0"))

    @property
    def own_slot(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.name == self.slot), None)


def check_server(server: Server) -> Iterator[Finding]:
    """All findings about the server, in the order in which they matter."""
    for check in (_version, _wal_level, _replication, _room, _plugin, _standby, _own_slot, _other_slots, _retention):
        yield from check(server)
    for check in (_timeouts, _old_transactions, _disk, _pooler, _encoding, _encryption, _sight):
        yield from check(server)


def set_setting(name: str, value: str) -> str:
    """The statement that changes a setting."""
    return f"ALTER SYSTEM SET {name} = {literal(value)};"


def _version(server: Server) -> Iterator[Finding]:
    yield Finding("version", Level.OK, f"Postgres {server.settings.get('server_version', server.version)}.")


def _wal_level(server: Server) -> Iterator[Finding]:
    level = server.settings.get("wal_level")
    if level == "logical":
        yield Finding("wal_level", Level.OK, "The log tells rows: wal_level is logical.")
        return
    fix = f"{set_setting('wal_level', 'logical')} {_RESTART}"
    if "rds.logical_replication" in server.settings:
        fix = "-- set rds.logical_replication = 1 in the parameter group, then restart the instance"
    elif "cloudsql.logical_decoding" in server.settings:
        fix = "-- set the flag cloudsql.logical_decoding = on, which restarts the instance"
    yield Finding("wal_level", Level.PROBLEM, f"The log does not tell rows: wal_level is {level}.", fix)


def _replication(server: Server) -> Iterator[Finding]:
    """The right to replicate, and whether the replication protocol gets through."""
    user = server.role.name
    if not server.role.may_replicate:
        fix = (
            f"GRANT rds_replication TO {quoted(user)};"
            if server.role.managed
            else f"ALTER ROLE {quoted(user)} REPLICATION;"
        )
        yield Finding("replication", Level.PROBLEM, f"The user {user!r} may not replicate.", fix)
        return
    try:
        connect_replication(server.dsn).close()
    except SourceError as error:
        fix = "-- capture by SQL instead: headwater capture --poll …"
        if isinstance(error, AccessDenied) and "pg_hba.conf" in error.message:
            database = server.dsn.database
            fix = f"-- in pg_hba.conf: host {quoted(database)} {quoted(user)} <address> scram-sha-256\n{_RELOAD}"
        elif "max_wal_senders" in error.message:
            fix = f"{set_setting('max_wal_senders', str(server.number('max_wal_senders') + 4))} {_RESTART}"
        yield Finding(
            "replication", Level.PROBLEM, f"The replication protocol does not get through: {error.message}", fix
        )
    else:
        yield Finding("replication", Level.OK, f"The user {user!r} may replicate, and the replication protocol works.")


def _room(server: Server) -> Iterator[Finding]:
    """Free slots, senders and connections."""
    slots, senders = server.number("max_replication_slots"), server.number("max_wal_senders")
    free_slots = slots - len(server.slots)
    if server.own_slot is None and free_slots < 1:
        fix = f"{set_setting('max_replication_slots', str(slots + 4))} {_RESTART}"
        yield Finding("slots", Level.PROBLEM, f"All {slots} replication slots are taken.", fix)
    else:
        yield Finding("slots", Level.OK, f"{free_slots} of {slots} replication slots are free.")
    free = senders - server.role.senders
    reading = server.own_slot is not None and server.own_slot.active_pid is not None
    if free < 1 and not reading:
        fix = f"{set_setting('max_wal_senders', str(senders + 4))} {_RESTART}"
        yield Finding("senders", Level.PROBLEM, f"All {senders} WAL senders are taken.", fix)
    else:
        yield Finding("senders", Level.OK, f"{free} of {senders} WAL senders are free.")
    reserved = server.number("superuser_reserved_connections") + server.number("reserved_connections")
    left = server.number("max_connections") - reserved - server.role.sessions
    if left < FEW_CONNECTIONS:
        fix = f"{set_setting('max_connections', str(server.number('max_connections') + 20))} {_RESTART}"
        yield Finding("connections", Level.WARNING, f"Only {max(left, 0)} more connections fit.", fix)
    else:
        yield Finding("connections", Level.OK, f"{left} more connections fit.")


def _plugin(server: Server) -> Iterator[Finding]:
    allowed = server.settings.get("output_plugin_libraries")
    if allowed is None:
        return
    if PLUGIN in [name.strip().strip('"') for name in allowed.split(",")]:
        yield Finding("plugin", Level.OK, f"The output plugin {PLUGIN} is allowed.")
    else:
        fix = f"ALTER SYSTEM SET output_plugin_libraries = {PLUGIN}; {_RELOAD}"
        yield Finding("plugin", Level.PROBLEM, f"output_plugin_libraries does not have {PLUGIN}.", fix)


def _standby(server: Server) -> Iterator[Finding]:
    if not server.role.standby:
        yield Finding("primary", Level.OK, "This is the primary.")
    elif server.version < 160000:
        text = "This is a standby, and standbys before Postgres 16 cannot decode their log."
        yield Finding("primary", Level.PROBLEM, text, "-- give the address of the primary")
    elif server.settings.get("hot_standby_feedback") != "on":
        text = "This is a standby without hot_standby_feedback: the primary may remove what the slot needs."
        yield Finding("primary", Level.WARNING, text, f"{set_setting('hot_standby_feedback', 'on')} {_RELOAD}")
    else:
        text = "This is a standby: the publication is made on the primary, and the slot is lost with this server."
        yield Finding("primary", Level.NOTE, text)


def _own_slot(server: Server) -> Iterator[Finding]:
    slot = server.own_slot
    if slot is None:
        yield Finding("slot", Level.OK, f"The slot {server.slot!r} will be made by the first capture.")
    elif slot.plugin != PLUGIN or slot.database != server.session.info.dbname:
        text = (
            f"A slot {slot.name!r} is there, of {slot.plugin or 'physical replication'} in database {slot.database!r}."
        )
        yield Finding("slot", Level.PROBLEM, text, "-- give another name: --slot")
    elif slot.invalidation is not None:
        text = f"The server gave up the slot {slot.name!r} ({slot.invalidation}): changes are lost."
        yield Finding("slot", Level.PROBLEM, text, "headwater resnapshot")
    elif slot.wal_status in ("extended", "unreserved"):
        left = "" if slot.safe_bytes is None else f" It is given up after {_amount(slot.safe_bytes)} more."
        text = f"The slot {slot.name!r} holds back {_amount(slot.held_bytes)} of log, more than max_wal_size.{left}"
        fix = "-- start the capture" if slot.active_pid is None else "-- look at the capture's log: it is behind"
        yield Finding("slot", Level.WARNING, text, fix)
    else:
        used = "nobody" if slot.active_pid is None else f"server process {slot.active_pid}"
        yield Finding(
            "slot", Level.OK, f"The slot {slot.name!r} holds {_amount(slot.held_bytes)} of log, read by {used}."
        )
    if slot is not None and not slot.failover and server.version >= 170000 and not server.role.standby:
        text = f"The slot {slot.name!r} is not copied to standbys: it is lost with this server."
        fix = f"ALTER_REPLICATION_SLOT {slot.name} (FAILOVER true); -- by the replication protocol, capture stopped"
        yield Finding("failover", Level.NOTE, text, fix)


def _other_slots(server: Server) -> Iterator[Finding]:
    for slot in server.slots:
        if slot.name == server.slot or slot.active_pid is not None or slot.temporary:
            continue
        drop = f"SELECT pg_drop_replication_slot({literal(slot.name)}); -- if nobody needs it"
        if slot.invalidation is not None:
            yield Finding("other slot", Level.NOTE, f"The slot {slot.name!r} was given up by the server.", drop)
        elif slot.held_bytes >= MUCH_LOG:
            text = f"The slot {slot.name!r}, which nobody reads, holds back {_amount(slot.held_bytes)} of log."
            yield Finding("other slot", Level.WARNING, text, drop)


def _retention(server: Server) -> Iterator[Finding]:
    """How long a stopped capture may stay stopped."""
    keep = server.number("max_slot_wal_keep_size") if "max_slot_wal_keep_size" in server.settings else -1
    if keep < 0:
        text = "While the capture is stopped the log grows without limit (max_slot_wal_keep_size = -1)."
        yield Finding("retention", Level.NOTE, text, f"{set_setting('max_slot_wal_keep_size', '50GB')} {_RELOAD}")
        return
    size = _amount(keep << 20)
    text = f"While the capture is stopped the server keeps {size} of log for it, then gives the slot up."
    if keep << 20 < MUCH_LOG:
        fix = f"{set_setting('max_slot_wal_keep_size', '50GB')} {_RELOAD}"
        yield Finding("retention", Level.WARNING, text, fix)
    else:
        yield Finding("retention", Level.OK, text)


def _timeouts(server: Server) -> Iterator[Finding]:
    idle = server.number("idle_replication_slot_timeout")
    if idle > 0:
        text = f"A capture that is stopped for {_time(idle)} loses its slot (idle_replication_slot_timeout)."
        fix = f"{set_setting('idle_replication_slot_timeout', '0')} {_RELOAD}"
        yield Finding("idle timeout", Level.WARNING, text, fix)
    sender = server.number("wal_sender_timeout")
    fix = f"{set_setting('wal_sender_timeout', '60s')} {_RELOAD}"
    if sender == 0:
        text = (
            "The server never ends a dead replication connection (wal_sender_timeout = 0), which keeps the slot taken."
        )
        yield Finding("sender timeout", Level.WARNING, text, fix)
    elif sender < SHORT_SENDER_TIMEOUT:
        text = f"The server ends replication connections that are silent for {sender} ms (wal_sender_timeout)."
        yield Finding("sender timeout", Level.WARNING, text, fix)


def _old_transactions(server: Server) -> Iterator[Finding]:
    """A new slot waits for them, and the log since their start is kept."""
    for row in ask(server.session, _OLD_TRANSACTIONS):
        text = f"Server process {row.pid} has had a transaction open for {_time(row.seconds)}: a new slot waits for it."
        yield Finding("transactions", Level.WARNING, text, f"SELECT pg_terminate_backend({row.pid});")
    for row in ask(server.session, _OLD_PREPARED):
        text = f"A prepared transaction has been waiting for {_time(row.seconds)}: a new slot waits for it."
        yield Finding(
            "transactions", Level.WARNING, text, f"ROLLBACK PREPARED {literal(row.gid)}; -- or COMMIT PREPARED"
        )


def _disk(server: Server) -> Iterator[Finding]:
    if server.role.sees_log_files and not server.role.standby:
        held = int(
            ask(server.session, "SELECT COALESCE(sum(size), 0) AS bytes FROM pg_catalog.pg_ls_waldir()")[0].bytes
        )
        yield Finding("log size", Level.OK, f"The server's log takes {_amount(held)} on disk.")
    directory = server.settings.get("data_directory")
    if directory is None or not _is_on_this_host(server.session, Path(directory)):
        return
    usage = shutil.disk_usage(directory)
    text = f"{_amount(usage.free)} of {_amount(usage.total)} are free where the server keeps its data."
    full = usage.free < usage.total * LITTLE_ROOM
    fix = "-- make room: a full disk stops the server" if full else None
    yield Finding("disk", Level.WARNING if full else Level.OK, text, fix)


def _pooler(server: Server) -> Iterator[Finding]:
    """A pooler gives process numbers of its own."""
    if ask(server.session, "SELECT pg_catalog.pg_backend_pid() AS pid")[0].pid != server.session.info.backend_pid:
        text = (
            "A connection pooler stands before the server; unless each session keeps its connection, settings get lost."
        )
        yield Finding("pooler", Level.WARNING, text, "-- give the address of the server itself")


def _encoding(server: Server) -> Iterator[Finding]:
    encoding = server.role.encoding
    if encoding == "SQL_ASCII":
        text = (
            "The database's encoding is SQL_ASCII: text may be in any encoding, and is refused where it is not UTF-8."
        )
        yield Finding("encoding", Level.WARNING, text, "-- restore the data into a database with ENCODING 'UTF8'")
    elif encoding != "UTF8":
        yield Finding("encoding", Level.NOTE, f"The server converts text from {encoding} to UTF-8.")


def _encryption(server: Server) -> Iterator[Finding]:
    if not server.session.pgconn.ssl_in_use and not _is_local(server.session):
        text = "The connection is not encrypted."
        yield Finding("encryption", Level.WARNING, text, "-- add sslmode=verify-full to the connection string")


def _sight(server: Server) -> Iterator[Finding]:
    if not server.role.sees_sessions:
        text = f"The user {server.role.name!r} does not see other sessions, so open transactions were not looked at."
        yield Finding("sight", Level.NOTE, text, f"GRANT pg_monitor TO {quoted(server.role.name)};")


def _is_local(session: Connection) -> bool:
    host = session.info.host or "/"
    return host.startswith(("/", "@", "127.")) or host in ("localhost", "::1")


def _is_on_this_host(session: Connection, directory: Path) -> bool:
    """Whether *directory* here is the server's own: the session's process is a child of the one that holds it."""
    try:
        postmaster = (directory / "postmaster.pid").read_text().splitlines()[0]
    except (OSError, IndexError):
        return False
    return status_fields(session.info.backend_pid)[1:2] == [postmaster]


def _amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _time(seconds: int) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} seconds"
