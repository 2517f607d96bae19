"""Opens change streams: the command that a server is asked, from a place on, for some collections.

A stream is opened on the database of the collections, which needs no right but to read it; where they are in several,
on the whole deployment. The server is asked for images of the documents, before and after each change, where it keeps
those of one collection at least: to look for what is not there costs it as much as the event itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from headwater.sources.mongodb.connection import Client, Dsn
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoOffset, token_document
from headwater.sources.mongodb.raw_cursor import Patience, RawCursor
from headwater.sources.mongodb.server import as_timestamp

BATCH_EVENTS: Final = 20_000
PATIENCE: Final = Patience(quick=10, idle=400)
"""An end of what there is, is an end of a transaction: after events it is asked for at once."""
_INTERNAL: Final = frozenset(("admin", "config", "local"))
_IMAGES: Final = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}


def watched_spaces(dsn: Dsn, names: Iterable[CollectionName], start: MongoOffset) -> list[str]:
    """The databases to watch for the collections *names*.

    Where there are none, those of the last event before *start*, or of the address: the place in the log goes on.
    """
    of_address = dsn.database if dsn.database not in _INTERNAL else ""
    return sorted({name.namespace for name in names}) or [space for space in (start.newest or of_address,) if space]


def open_watch(
    dsn: Dsn,
    client: Client,
    names: Sequence[CollectionName],
    spaces: Sequence[str],
    start: MongoOffset,
    *,
    images: bool,
    options: Mapping[str, Any],
) -> RawCursor:
    """The events of the collections *names* after *start*.

    :param spaces: the databases that are watched. :param images: ask for those that the server keeps.
    :param options: more that is asked of the stream.
    :raises LogPurged: the server no longer has them. :raises AccessDenied: the user may not watch.
    """
    return _opened(dsn, client, names, spaces, _after(start) | (_IMAGES if images else {}) | dict(options))


def open_all(dsn: Dsn, client: Client, spaces: Sequence[str], at: int, batch_size: int) -> RawCursor:
    """All events of the databases *spaces* from the cluster time *at* on, at it too.

    :raises LogPurged: the server no longer has them. :raises AccessDenied: the user may not watch.
    """
    return _opened(dsn, client, None, spaces, {"startAtOperationTime": as_timestamp(at)}, batch_size)


def now(dsn: Dsn, client: Client, spaces: Sequence[str]) -> str:
    """The resume token of this moment. :raises AccessDenied: the user may not watch."""
    with _opened(dsn, client, [], spaces, {}) as cursor:
        return cursor.opened.token


def _after(start: MongoOffset) -> dict[str, Any]:
    if start.token:
        return {"startAfter": token_document(start.token)}
    return {"startAtOperationTime": as_timestamp(start.time + 1)}


def _opened(
    dsn: Dsn,
    client: Client,
    names: Sequence[CollectionName] | None,
    spaces: Sequence[str],
    options: dict[str, Any],
    batch_size: int = BATCH_EVENTS,
) -> RawCursor:
    whole = len(spaces) != 1
    wanted = {} if names is None else _wanted(names)
    stage = options | ({"allChangesForCluster": True} if whole else {})
    command = {
        "aggregate": 1,
        "pipeline": [
            {"$changeStream": stage},
            {"$match": wanted},
            {"$changeStreamSplitLargeEvent": {}},
        ],
        "cursor": {"batchSize": 0},
    }
    database = "admin" if whole else spaces[0]
    return RawCursor(dsn, client, database, command, batch_size=batch_size, patience=PATIENCE)


def _wanted(names: Sequence[CollectionName]) -> dict[str, Any]:
    spaces = [{"db": name.namespace, "coll": name.name} for name in names]
    gone = [{"operationType": kind} for kind in ("dropDatabase", "invalidate")]
    return {"$or": [{"ns": {"$in": spaces}}, {"to": {"$in": spaces}}, *gone]}
