"""The last event that was told of each database: a server that does not have it is not the one that was followed.

A server that was restored from an older state lacks what came after it, whatever it wrote since. A user who may watch
the whole deployment looks for the newest event of all. One who may not looks for the last one of each database that is
captured now: events of others are not shown to him, and that one is not there says nothing. It is enough: where a
restore lost anything of a database, it lost its last event.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from headwater.sources.errors import AccessDenied, LogPurged, SourceBusy, SourceWentBack
from headwater.sources.mongodb.connection import RESNAPSHOT, Client, Dsn
from headwater.sources.mongodb.documents.decoder import RawArray
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.event_rows import change_places, token_of
from headwater.sources.mongodb.offset import UNKNOWN, MongoOffset, is_same_event, token_time
from headwater.sources.mongodb.watch import open_all

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
