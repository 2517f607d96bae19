"""The replication slot: made once, and checked at every start against what is durable here. Never a silent gap.

===========================================  ==================================================================
what is found                                what it means
===========================================  ==================================================================
another system identifier                    :class:`ServerReplaced`
the log ends before our position             :class:`SourceWentBack`: restored, or a standby that had less
another timeline, forked before our position :class:`SourceWentBack`: what we hold of it never happened there
no slot                                      :class:`SlotLost`
slot without its log                         :class:`SlotInvalidated`
slot confirmed beyond our position           :class:`SlotMoved`: somebody else read from it
===========================================  ==================================================================

None of these mends itself, and a slot is never made anew in silence: the changes between are gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import psycopg
from psycopg import errors as pg

from headwater import failpoints
from headwater.errors import InputError
from headwater.sources.errors import (
    ServerReplaced,
    SlotBusy,
    SlotInvalidated,
    SlotLost,
    SlotMoved,
    SourceBusy,
    SourceMisconfigured,
    SourceWentBack,
)
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.names import literal
from headwater.sources.postgres.offset import Lsn

PLUGIN: Final = "pgoutput"
RESNAPSHOT: Final = "Run: headwater resnapshot"
FAILOVER_SINCE: Final = 170000
CREATE_TIMEOUT_SECONDS: Final = 60
RELEASE_SECONDS: Final = 5.0
SLOT_DROPPED: Final = failpoints.register("renewal.slot_dropped")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Which server, and which course of its history.

    :ivar system_id: made by ``initdb``; a copy of the server and its standbys have the same.
    :ivar timeline: counts promotions and restores.
    :ivar database: the database that the slot is of.
    """

    system_id: str
    timeline: int
    database: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(str(fields["system_id"]), int(fields["timeline"]), str(fields["database"]))


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """Where the server is.

    :ivar wal_end: the end of its log on disk; nothing beyond was ever sent.
    :ivar forks: for each earlier timeline of its history the position at which it was left; ``None`` where this
        connection cannot ask for it.
    """

    identity: ServerIdentity
    wal_end: Lsn
    forks: Mapping[int, Lsn] | None


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as the server has it.

    :ivar confirmed: what its reader said to be durable; the stream goes on from there.
    :ivar restart: from here on the server keeps its log for the slot.
    :ivar wal_status: ``reserved``, ``extended``, ``unreserved`` or ``lost``.
    :ivar invalidation: why the server gave it up; ``None`` while it has not.
    :ivar safe_bytes: how much more log may be written before it is given up; ``None`` for without limit.
    :ivar held_bytes: of log that the server keeps for it.
    """

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    active_pid: int | None
    confirmed: Lsn | None
    restart: Lsn | None
    wal_status: str | None
    invalidation: str | None
    safe_bytes: int | None
    held_bytes: int
    failover: bool


_SLOTS = """
SELECT s.slot_name AS name, s.plugin, s.database, s.temporary, s.active_pid,
       (s.confirmed_flush_lsn - '0/0'::pg_catalog.pg_lsn) AS confirmed,
       (s.restart_lsn - '0/0'::pg_catalog.pg_lsn) AS restart,
       s.wal_status, s.safe_wal_size AS safe_bytes, pg_catalog.to_jsonb(s) AS facts,
       COALESCE(pg_catalog.pg_wal_lsn_diff(
         CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
              ELSE pg_catalog.pg_current_wal_insert_lsn() END, s.restart_lsn), 0) AS held_bytes
FROM pg_catalog.pg_replication_slots s
"""

_POSITION = """
SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system()) AS system_id,
       pg_catalog.current_database() AS database,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN
         (SELECT GREATEST(c.timeline_id, w.received_tli)
          FROM pg_catalog.pg_control_checkpoint() c LEFT JOIN pg_catalog.pg_stat_wal_receiver w ON true)
       ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8)
            )::bit(32)::int END AS timeline,
       (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
             ELSE pg_catalog.pg_current_wal_flush_lsn() END - '0/0'::pg_catalog.pg_lsn) AS wal_end
"""

# Sessions that a new slot has to wait for: it begins where no older transaction is open.
_BLOCKERS = """
SELECT a.pid FROM pg_catalog.pg_stat_activity a
WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
ORDER BY a.xact_start LIMIT 5
"""


def server_position(session: Connection) -> ServerPosition:
    """Which server this is and where its log ends.

    :param session: one of replication can also tell where earlier timelines ended, one of a user who may read the
        server's files, too; see :class:`ServerPosition`.
    """
    row = ask(session, _POSITION)[0]
    identity = ServerIdentity(row.system_id, row.timeline, row.database)
    forks: Mapping[int, Lsn] | None = {}
    if row.timeline > 1:
        forks = _forks(session, row.timeline)
    return ServerPosition(identity, Lsn(int(row.wal_end)), forks)


def _forks(session: Connection, timeline: int) -> Mapping[int, Lsn] | None:
    if session.info.get_parameters().get("replication"):
        query, place = f"TIMELINE_HISTORY {timeline}", 1
    else:
        query, place = f"SELECT pg_catalog.pg_read_file('pg_wal/{timeline:08X}.history')", 0
    try:
        history = session.execute(query.encode()).fetchone()
    except psycopg.Error:
        return None
    if history is None:
        return None
    content = history[place]
    return parse_history(content if isinstance(content, str) else bytes(content).decode("utf-8", "replace"))


def parse_history(content: str) -> dict[int, Lsn]:
    """Where each earlier timeline was left, from a timeline history file."""
    lines = (line.split("#")[0].split() for line in content.splitlines())
    return {int(words[0]): Lsn.parse(words[1]) for words in lines if len(words) >= 2 and words[0].isdigit()}


def read_slot(session: Connection, name: str) -> Slot | None:
    """The slot of that name; ``None`` where there is none."""
    return next(iter(read_slots(session, name)), None)


def read_slots(session: Connection, name: str | None = None) -> list[Slot]:
    """All slots of the server, of every database, or the one of that name."""
    condition = "" if name is None else f"WHERE s.slot_name = {literal(name)}"  # replication takes no parameters
    return [_slot(row) for row in ask(session, f"{_SLOTS} {condition} ORDER BY 1")]


def _slot(row: Any) -> Slot:
    facts = row.facts
    invalidation = facts.get("invalidation_reason")
    if invalidation is None and facts.get("conflicting"):
        invalidation = "conflict with recovery"
    if invalidation is None and row.wal_status == "lost":
        invalidation = "wal_removed"
    return Slot(
        name=row.name,
        plugin=row.plugin,
        database=row.database,
        temporary=row.temporary,
        active_pid=row.active_pid,
        confirmed=None if row.confirmed is None else Lsn(int(row.confirmed)),
        restart=None if row.restart is None else Lsn(int(row.restart)),
        wal_status=row.wal_status,
        invalidation=invalidation,
        safe_bytes=row.safe_bytes,
        held_bytes=max(0, int(row.held_bytes)),
        failover=bool(facts.get("failover")),
    )


def create_slot(session: Connection, name: str) -> Slot:
    """Make the slot, or take the one that is there and that nothing durable depends on yet.

    From 17 on a standby is asked to keep a copy of it (``failover``). The publication must be there before.

    :raises InputError: not a name for a slot.
    :raises SourceMisconfigured: the server cannot have it, or a slot of that name is of another kind.
    :raises SlotInvalidated: a slot of that name is there and was given up by the server.
    :raises SourceBusy: transactions stayed open that the slot has to wait for.
    """
    if not re.fullmatch("[a-z0-9_]{1,63}", name):
        raise InputError(
            f"Received the slot name {name!r}; valid are 1 to 63 lower-case letters, digits and underscores.",
            next_step="Give another name.",
        )
    slot = read_slot(session, name)
    if slot is None:
        _create(session, name)
        slot = read_slot(session, name)
    if slot is None:
        raise SlotLost(f"The replication slot {name!r} was dropped as soon as it was made.", next_step="Try again.")
    _require_usable(slot, str(session.info.dbname))
    return slot


def _create(session: Connection, name: str) -> None:
    arguments = "%s, %s, false, false"
    on_primary = session.execute("SELECT NOT pg_catalog.pg_is_in_recovery()").fetchone() == (True,)
    if session.info.server_version >= FAILOVER_SINCE and on_primary:
        arguments += ", true"
    create = f"SELECT pg_catalog.pg_create_logical_replication_slot({arguments})".encode()
    try:
        with session.transaction():
            session.execute(f"SET LOCAL statement_timeout = '{CREATE_TIMEOUT_SECONDS}s'".encode())
            session.execute("SET LOCAL lock_timeout = 0")  # it waits for open transactions as for locks
            session.execute(create, [name, PLUGIN])
    except pg.DuplicateObject:
        pass
    except pg.QueryCanceled:
        pids = ", ".join(str(row.pid) for row in ask(session, _BLOCKERS)) or "unknown"
        raise SourceBusy(
            f"The replication slot {name!r} could not be made: open transactions held it up (server processes {pids}).",
            next_step="Try again when they have ended, or end them with pg_terminate_backend(pid).",
        ) from None


def drop_slot(session: Connection, name: str) -> None:
    """Remove the slot, if it is there; the server then keeps no log for us.

    :raises SlotBusy: it is being read.
    """
    slot = read_slot(session, name)
    if slot is None:
        return
    try:
        session.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", [name])
    except pg.ObjectInUse:
        raise SlotBusy(name, slot.active_pid) from None
    except pg.UndefinedObject:
        return


def replace_slot(
    session: Connection,
    name: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Slot:
    """Give up the slot that is there, whatever became of it, and make it anew: what lies between is lost to us.

    One that an earlier connection of ours still holds is waited for, for a few seconds.

    :raises SlotBusy: it is being read, and stays as it is. :raises SourceMisconfigured: it is of another kind.
    :raises SourceBusy: transactions stayed open that the new slot has to wait for; the old one is gone by then.
    """
    slot = read_slot(session, name)
    if slot is not None:
        _require_kind(slot, str(session.info.dbname))
    give_up_slot(session, name, clock=clock, sleep=sleep)
    failpoints.hit(SLOT_DROPPED)
    return create_slot(session, name)


def give_up_slot(
    session: Connection,
    name: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """As :func:`drop_slot`; one that an earlier connection of ours still holds is waited for, for a few seconds.

    :raises SlotBusy: it is being read, and stays as it is.
    """
    deadline = clock() + RELEASE_SECONDS
    while True:
        try:
            drop_slot(session, name)
            return
        except SlotBusy:
            if clock() >= deadline:
                raise
            sleep(0.05)


def check_slot(slot: Slot | None, name: str, durable: int, known: ServerIdentity, server: ServerPosition) -> Slot:
    """Look whether the stream can go on from what is durable here, with nothing missing between.

    :param durable: the position up to which everything is durable here.
    :param known: the server that it is a position of.
    :raises ServerReplaced: :raises SourceWentBack: :raises SlotLost: :raises SlotInvalidated: :raises SlotMoved: as
        the table above tells. :raises SlotBusy: another session reads the slot.
    """
    ours = Lsn(durable)
    _require_same_history(ours, known, server)
    if slot is None:
        raise SlotLost(
            f"The replication slot {name!r} is gone; changes after {ours} may be lost with it.", next_step=RESNAPSHOT
        )
    _require_usable(slot, known.database)
    if slot.confirmed is not None and slot.confirmed > ours:
        raise SlotMoved(
            f"The replication slot {name!r} was moved to {slot.confirmed} by somebody else; "
            f"only what lies before {ours} is durable here.",
            next_step=f"Give every other reader another slot. {RESNAPSHOT}",
        )
    if slot.active_pid is not None:
        raise SlotBusy(name, slot.active_pid)
    return slot


def _require_same_history(ours: Lsn, known: ServerIdentity, server: ServerPosition) -> None:
    now = server.identity
    if (now.system_id, now.database) != (known.system_id, known.database):
        raise ServerReplaced(
            f"This is another server (system identifier {now.system_id}, database {now.database!r}) than the one that "
            f"was captured ({known.system_id}, {known.database!r}).",
            next_step=f"Give the address of the captured server, or start anew. {RESNAPSHOT}",
        )
    if server.wal_end < ours:
        raise SourceWentBack(
            f"The server's log ends at {server.wal_end}, before our position {ours}: it was restored from a backup, or "
            "a standby was promoted that had not all of it.",
            next_step=RESNAPSHOT,
        )
    if now.timeline == known.timeline:
        return
    fork = None if server.forks is None else server.forks.get(known.timeline)
    if fork is None or fork < ours:
        left = "at an unknown position" if fork is None else f"at {fork}"
        raise SourceWentBack(
            f"The server is on timeline {now.timeline} and left our timeline {known.timeline} {left}; we hold changes "
            f"up to {ours}, some of which never happened there.",
            next_step=RESNAPSHOT,
        )


def _require_usable(slot: Slot, database: str) -> None:
    _require_kind(slot, database)
    if slot.invalidation is not None:
        raise SlotInvalidated(
            slot.name,
            slot.invalidation,
            next_step=f"Raise {_LIMITS.get(slot.invalidation, 'max_slot_wal_keep_size')}. {RESNAPSHOT}",
        )


def _require_kind(slot: Slot, database: str) -> None:
    if slot.plugin != PLUGIN or slot.database != database or slot.temporary:
        kind = "a temporary one" if slot.temporary else f"of {slot.plugin or 'physical replication'}"
        raise SourceMisconfigured(
            f"The replication slot {slot.name!r} is {kind} in database {slot.database!r}; "
            f"needed is one of {PLUGIN} in {database!r}.",
            next_step="Give another slot name.",
        )


_LIMITS: Final = {"idle_timeout": "idle_replication_slot_timeout", "wal_level_insufficient": "wal_level"}
