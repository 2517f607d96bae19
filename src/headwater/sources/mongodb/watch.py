"""Opens change streams: the command that a server is asked, from a place on, for some collections.

A stream is opened on the database of the collections, which needs no right but to read it; where they are in several,
on the whole deployment. What it is told of an update beside the key is one of:

==============  ===============================================================================================
``IMAGES``      the document just after the change, which the server keeps where
                ``changeStreamPreAndPostImages`` is on for the collection
``LOOKUP``      the document as it is when the server comes to the event: the newest state, perhaps of later
==============  ===============================================================================================

The document just before a change is told wherever the server keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from headwater.sources.mongodb.connection import Client, Dsn
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoOffset, token_document
from headwater.sources.mongodb.raw_cursor import RawCursor
from headwater.sources.mongodb.server import as_timestamp

BATCH_EVENTS: Final = 20_000
IDLE_MS: Final = 400
"""How long the server waits for an event before it tells how far it has come."""


class Documents(Enum):
    """Which document an update is told with; the values are those of ``fullDocument``."""

    IMAGES = "whenAvailable"
    LOOKUP = "updateLookup"


def open_watch(
    dsn: Dsn,
    client: Client,
    names: Sequence[CollectionName],
    spaces: Sequence[str],
    start: MongoOffset,
    documents: Documents,
) -> RawCursor:
    """The events of the collections *names* after *start*.

    :param spaces: the databases that are watched.
    :raises LogPurged: the server no longer has them. :raises AccessDenied: the user may not watch.
    """
    return _opened(dsn, client, names, spaces, documents, _after(start))


def now(dsn: Dsn, client: Client, spaces: Sequence[str]) -> str:
    """The resume token of this moment. :raises AccessDenied: the user may not watch."""
    with _opened(dsn, client, [], spaces, Documents.LOOKUP, {}) as cursor:
        return cursor.opened.token


def _after(start: MongoOffset) -> dict[str, Any]:
    if start.token:
        return {"startAfter": token_document(start.token)}
    return {"startAtOperationTime": as_timestamp(start.time + 1)}


def _opened(
    dsn: Dsn,
    client: Client,
    names: Sequence[CollectionName],
    spaces: Sequence[str],
    documents: Documents,
    start: dict[str, Any],
) -> RawCursor:
    whole = len(spaces) != 1
    stage: dict[str, Any] = {
        "fullDocument": documents.value,
        "fullDocumentBeforeChange": "whenAvailable",
        **start,
    }
    if whole:
        stage["allChangesForCluster"] = True
    command = {
        "aggregate": 1,
        "pipeline": [{"$changeStream": stage}, {"$match": _wanted(names)}, {"$changeStreamSplitLargeEvent": {}}],
        "cursor": {"batchSize": 0},
    }
    database = "admin" if whole else spaces[0]
    return RawCursor(dsn, client, database, command, batch_size=BATCH_EVENTS, wait_ms=IDLE_MS)


def _wanted(names: Sequence[CollectionName]) -> dict[str, Any]:
    spaces = [{"db": name.namespace, "coll": name.name} for name in names]
    gone = [{"operationType": kind} for kind in ("dropDatabase", "invalidate")]
    return {"$or": [{"ns": {"$in": spaces}}, {"to": {"$in": spaces}}, *gone]}
