"""Sessions with the Postgres of a sink: connecting, and errors of the server in our own words, without values."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import errors as pg

from headwater.errors import HeadwaterError
from headwater.sinks.errors import (
    SinkBusy,
    SinkError,
    SinkInputError,
    SinkLoginRefused,
    SinkRowError,
    SinkUnreachable,
    SinkUnwritable,
    StagedLost,
)
from headwater.sources.errors import InvalidDsn, LoginRefused, SourceBusy, SourceUnreachable
from headwater.sources.postgres.connection import SESSION, Connection, Dsn, open_watched, translated

IDLE_SECONDS: Final = 60
"""A process that sleeps in the middle of a transaction keeps the tokens locked for so long, then the server ends it."""

_SETTINGS: Final = {
    **SESSION,
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    "client_min_messages": "error",
    "application_name": "headwater",
}
_OF_COPY: Final = re.compile(r"COPY \S+, line \d+, column (.+?)(?:: |$)")
_QUOTED: Final = re.compile('".*"', re.DOTALL)
_ROW_STATES: Final = ("22", "23", "44")


def address(dsn: str) -> Dsn:
    """:raises SinkInputError: it cannot be read."""
    try:
        return Dsn(dsn)
    except InvalidDsn as error:
        raise SinkInputError(error.message, next_step=error.next_step) from None


def connect(dsn: Dsn) -> Connection:
    """:raises psycopg.Error: it cannot be reached."""
    connection = open_watched(dsn, dsn.conninfo())
    try:
        wanted = ", ".join(f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items())
        connection.execute(f"SELECT {wanted}".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def sink_error(error: psycopg.Error, dsn: Dsn, table: str, own_schema: str) -> HeadwaterError:
    """Our error for one of psycopg.

    :param table: the full name of the table at the source, or nothing.
    """
    state = error.sqlstate or ""
    said = dsn.hide(" ".join((error.diag.message_primary or "").split()))
    if state.startswith(_ROW_STATES) or state in ("54000", "P0001") or (not state and isinstance(error, pg.DataError)):
        return SinkRowError(table, _reason(error, state, said), column=_column(error))
    if isinstance(error, pg.UndefinedTable | pg.UndefinedColumn | pg.InvalidSchemaName):
        if f'"{own_schema}.s' in said:
            return StagedLost(f"What was staged for {table} is gone from {dsn}.", next_step="It is staged anew.")
        return SinkBusy(f"{table} was changed at {dsn} meanwhile: {said}.", next_step="Try again.")
    if isinstance(error, pg.InsufficientPrivilege):
        return SinkUnwritable(
            f"The user {dsn.user!r} lacks a right at {dsn}: {said}.",
            next_step=f'Grant it; to make our own tables: GRANT CREATE ON DATABASE "{dsn.database}" TO "{dsn.user}";',
        )
    if isinstance(error, pg.IdleInTransactionSessionTimeout):  # this process slept, and others had to go on
        return SinkUnreachable(f"{dsn} ended a session that did nothing for {IDLE_SECONDS} s.", next_step="Try again.")
    found = translated(error, dsn)
    kind: type[SinkError] = SinkError
    if isinstance(found, SourceUnreachable):
        kind = SinkUnreachable
    elif isinstance(found, SourceBusy):
        kind = SinkBusy
    elif isinstance(found, LoginRefused):
        kind = SinkLoginRefused
    elif isinstance(found, ValueError | LookupError):
        kind = SinkUnwritable
    return kind(found.message, next_step=found.next_step or "The server's log has the statement.")


def _reason(error: psycopg.Error, state: str, said: str) -> str:
    """What is wrong with the row; the server repeats values in quotes, and a trigger may say anything."""
    if not state:
        return "a text has the character 0, which Postgres has not"
    if state == "P0001":
        return "a trigger of the table refuses it"
    constraint = error.diag.constraint_name
    reason = _QUOTED.sub("…", said)
    return f"{reason} (constraint {constraint})" if constraint else reason


def _column(error: psycopg.Error) -> str | None:
    of_copy = _OF_COPY.match(error.diag.context or "")
    return error.diag.column_name or (of_copy[1] if of_copy else None)
