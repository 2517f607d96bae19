"""Opens change streams: the command that a server is asked, from a place on, for some collections.

A stream is opened on the database of the collections, which needs no right but to read it; where they are in several,
on the whole deployment. The server is asked for images of the documents, before and after each change, where it keeps
those of one collection at least: to look for what is not there costs it as much as the event itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.sources.errors import AccessDenied, LogPurged, SourceBusy, SourceWentBack
from headwater.sources.mongodb.connection import RESNAPSHOT, Client, Dsn
from headwater.sources.mongodb.documents.decoder import RawArray
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.event_rows import change_places, token_of
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import UNKNOWN, MongoOffset, is_same_event, token_document, token_time
from headwater.sources.mongodb.raw_cursor import Patience, RawCursor
from headwater.sources.mongodb.server import as_timestamp

_LOOK_SECONDS: Final = 30.0
_LOOK_EVENTS: Final = 1000


def with_events(known: Mapping[str, str], events: pa.RecordBatch) -> dict[str, str]:
    """*known*, by database, after *events* were told. Others than changes of documents, such as ``invalidate``, are
    those of one stream: in another one a server does not find them."""
    changes = change_places(events)
    if not len(changes):
        return dict(known)
    spaces = events.column("database").take(pa.array(changes)).dictionary_encode()
    newest = len(changes) - 1 - np.unique(spaces.indices.to_numpy()[::-1], return_index=True)[1]
    found = {spaces[place].as_py(): token_of(events, int(changes[place])) for place in newest.tolist()}
    return {space: token for space, token in known.items() if space != UNKNOWN} | found


def require_events(dsn: Dsn, client: Client, spaces: Sequence[str], place: MongoOffset) -> None:
    """:raises SourceWentBack: the server has another history than the one that *place* is in.

    A server that was restored from an older state lacks what came after it, whatever it wrote since. A user who may
    watch the whole deployment looks for the newest event of all. One who may not looks for the last one of each
    database that is captured now: events of others are not shown to that user, and that one is missing says nothing. It
    is enough: where a restore lost anything of a database, it lost its last event.

    :param spaces: the databases that are captured now. :raises SourceBusy: the server has not come to the place yet.
    """
    if place.events and not _has_events(dsn, client, spaces, place):
        raise SourceWentBack(
            f"{dsn} does not have the last event that was captured: it was restored from an older state.",
            next_step=RESNAPSHOT,
        )


def _has_events(dsn: Dsn, client: Client, spaces: Sequence[str], place: MongoOffset) -> bool:
    """Where nobody can tell, it has them: its log does not reach back, or the user may not look."""
    try:
        return _has(dsn, client, [], place.events[place.newest])
    except AccessDenied:
        return all(_has(dsn, client, [space], place.events[space]) for space in spaces if space in place.events)


def _has(dsn: Dsn, client: Client, spaces: Sequence[str], token: str) -> bool:
    """Whether the event of *token* is in the log of the databases *spaces*, or of all where there are none."""
    at = token_time(token)
    if at is None:
        return True
    decoder, end = EventDecoder(), time.monotonic() + _LOOK_SECONDS
    try:
        with open_all(dsn, client, spaces, at, _LOOK_EVENTS) as cursor:
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
    except LogPurged:
        return True
    raise SourceBusy(f"{dsn} has not come to the last event that was captured.", next_step="Try again.")


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
