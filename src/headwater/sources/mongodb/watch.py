"""Opens change streams: the command that a server is asked, from a place on, for some collections.

A stream is opened on the database of the collections, which needs no right but to read it; where they are in several,
on the whole deployment. The server is asked for images of the documents, before and after each change, where it keeps
those of one collection at least: to look for what is not there costs it as much as the event itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headwater.sources.errors import AccessDenied
from headwater.sources.mongodb.connection import BadToken, Client, Dsn
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoOffset, token_document
from headwater.sources.mongodb.raw_cursor import Patience, RawCursor
from headwater.sources.mongodb.server import as_timestamp

BATCH_EVENTS: Final = 20_000
PATIENCE: Final = Patience(quick=10, idle=400)
"""An end of what there is, is an end of a transaction: after events it is asked for at once."""
_LOOK_SECONDS: Final = 20.0
_IMAGES: Final = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}


def open_watch(
    dsn: Dsn,
    client: Client,
    names: Sequence[CollectionName],
    spaces: Sequence[str],
    start: MongoOffset,
    *,
    images: bool,
) -> RawCursor:
    """The events of the collections *names* after *start*.

    :param spaces: the databases that are watched. :param images: ask for those that the server keeps.
    :raises LogPurged: the server no longer has them. :raises AccessDenied: the user may not watch.
    """
    return _opened(dsn, client, names, spaces, _after(start) | (_IMAGES if images else {}))


def knows(dsn: Dsn, client: Client, spaces: Sequence[str], start: MongoOffset) -> bool:
    """Whether the server has the event of the token of *start* in its log, whatever collection it is of.

    All databases are looked at; only *spaces* where the user may not: then nothing else was watched before.
    """
    for watched in ([], spaces):
        try:
            with _opened(dsn, client, None, watched, _after(start)) as cursor:
                cursor.next(_LOOK_SECONDS)
            return True
        except BadToken:
            return False
        except AccessDenied:
            if watched is spaces:
                raise
    return False


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
    return RawCursor(dsn, client, database, command, batch_size=BATCH_EVENTS, patience=PATIENCE)


def _wanted(names: Sequence[CollectionName]) -> dict[str, Any]:
    spaces = [{"db": name.namespace, "coll": name.name} for name in names]
    gone = [{"operationType": kind} for kind in ("dropDatabase", "invalidate")]
    return {"$or": [{"ns": {"$in": spaces}}, {"to": {"$in": spaces}}, *gone]}
