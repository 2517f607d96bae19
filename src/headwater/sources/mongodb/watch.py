"""Opens change streams: the command that a server is asked, from a place on, for some collections.

A stream is opened on the database of the collections, which needs no right but to read it; where they are in several,
on the whole deployment. The server is asked for images of the documents, before and after each change, where it keeps
those of one collection at least: to look for what is not there costs it as much as the event itself.

A server that was restored from an older state does not have the events that came after it (:func:`has_event`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.sources.errors import AccessDenied, LogPurged, SourceBusy, SourceWentBack
from headwater.sources.mongodb.connection import RESNAPSHOT, Client, Dsn
from headwater.sources.mongodb.documents.decoder import RawArray
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoOffset, is_same_event, token_document, token_time
from headwater.sources.mongodb.raw_cursor import Patience, RawCursor
from headwater.sources.mongodb.server import as_timestamp

BATCH_EVENTS: Final = 20_000
PATIENCE: Final = Patience(quick=10, idle=400)
"""An end of what there is, is an end of a transaction: after events it is asked for at once."""
_LOOK_SECONDS: Final = 30.0
_LOOK_EVENTS: Final = 1000
_IMAGES: Final = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}


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


def require_event(dsn: Dsn, client: Client, spaces: Sequence[str], token: str) -> None:
    """:raises SourceWentBack: the server has another history than the one that *token* is of."""
    if not has_event(dsn, client, spaces, token):
        raise SourceWentBack(
            f"{dsn} does not have the last event that was captured: it was restored from an older state.",
            next_step=RESNAPSHOT,
        )


def has_event(dsn: Dsn, client: Client, spaces: Sequence[str], token: str) -> bool:
    """Whether the server has the event of *token* in its log, whatever collection it is of.

    All databases are looked at; only *spaces* where the user may not: then nothing else was watched before. Where its
    log does not reach back to the event nobody can tell, and it counts as had.

    :raises SourceBusy: the server has not come to it yet.
    """
    at = token_time(token)
    if at is None:
        return True
    for watched in ([], spaces):
        try:
            return _is_there(dsn, client, watched, at, token)
        except LogPurged:
            return True
        except AccessDenied:
            if watched is spaces:
                raise
    return False


def _is_there(dsn: Dsn, client: Client, spaces: Sequence[str], at: int, token: str) -> bool:
    decoder, end = EventDecoder(), time.monotonic() + _LOOK_SECONDS
    start = {"startAtOperationTime": as_timestamp(at)}
    with _opened(dsn, client, None, spaces, start, _LOOK_EVENTS) as cursor:
        while (batch := cursor.next(max(0.0, end - time.monotonic()))) is not None:
            if batch.is_empty:
                if (token_time(batch.token) or 0) > at:
                    return False
                continue
            end = time.monotonic() + _LOOK_SECONDS  # a large transaction has many events of one time
            made = decoder.decode(RawArray(batch.documents)).select(["cluster_time", "token", "fragment"])
            for when, found, fragment in zip(*(column.to_pylist() for column in made.columns), strict=True):
                if when > at:
                    return False
                if when == at and (fragment is not None or is_same_event(found, token)):
                    return True
            if batch.is_last:  # what was watched is gone
                return False
    raise SourceBusy(f"{dsn} has not come to the last event that was captured.", next_step="Try again.")


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
