"""EventDecoder: raw events of a change stream into a RecordBatch, their documents still raw. Pure.

>>> decoder = EventDecoder()  # doctest: +SKIP
>>> for batch in collection.aggregate_raw_batches([{"$changeStream": {…}}]):  # doctest: +SKIP
...     events = decoder.decode(batch)

One row for each event, in their order:

==================  ==========  ====================================================================================
column              Arrow       what it holds
==================  ==========  ====================================================================================
operation           string      ``operationType``: insert, update, replace, delete, drop, rename, invalidate, …
token               string      ``_id._data``: the resume token of the event; opaque, without an order
type_bits           binary      ``_id._typeBits``: the rest of the token, where it has one (keys of mixed number types)
cluster_time        uint64      seconds in the high 32 bits, ordinal in the low; these order
wall_time           timestamp   in milliseconds, UTC
commit_time         uint64      ``commitTimestamp``: since when readers see it, where that is another cluster time
transaction         int64       ``txnNumber``: with *session* the transaction of the event; null outside of one
session             binary      ``lsid``, a raw document
database            string      ``ns.db``
collection          string      ``ns.coll``; null where the event is one of the whole database
to_database         string      ``to.db``: of a rename
to_collection       string      ``to.coll``
key                 binary      ``documentKey``, a raw document
document            binary      ``fullDocument``, a raw document; null where there is none, or it was deleted since
before              binary      ``fullDocumentBeforeChange``, likewise
update              binary      ``updateDescription``, a raw document
fragment            int32       ``splitEvent.fragment``, from 1: the event is too large for one document
fragments           int32       ``splitEvent.of``
==================  ==========  ====================================================================================

The binary columns go into a :class:`~.decoder.DocumentDecoder` as they are.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents.decoder import RawDocuments, array, decoded
from headwater.sources.mongodb.documents.layout import Codec, Made, codec, described
from headwater.sources.mongodb.documents.types import DocumentType

_EVENT: Final = {
    "operationType": "string",
    "_id": "struct<_data: string, _typeBits: binData>",
    "clusterTime": "timestamp",
    "wallTime": "date",
    "commitTimestamp": "timestamp",
    "txnNumber": "long",
    "lsid": "raw",
    "ns": "struct<db: string, coll: string>",
    "to": "struct<db: string, coll: string>",
    "documentKey": "raw",
    "fullDocument": "raw",
    "fullDocumentBeforeChange": "raw",
    "updateDescription": "raw",
    "splitEvent": "struct<fragment: int, of: int>",
}
_COLUMNS: Final = (
    *(
        "operation",
        "token",
        "type_bits",
        "cluster_time",
        "wall_time",
        "commit_time",
        "transaction",
        "session",
        "database",
        "collection",
    ),
    *("to_database", "to_collection", "key", "document", "before", "update", "fragment", "fragments"),
)
_TYPES: Final = {name: DocumentType.parse(text) for name, text in _EVENT.items()}
_ARROW: Final = [
    part.type for kind in _TYPES.values() for part in (kind.arrow if kind.fields else [pa.field("", kind.arrow)])
]
EVENT_SCHEMA: Final = pa.schema(zip(_COLUMNS, _ARROW, strict=True))


class EventDecoder:
    """Events of change streams."""

    def __init__(self, *, codec_used: Codec | None = None) -> None:
        self._codec = codec_used or codec()
        self._plan = self._codec.plan(tuple(described(name, kind) for name, kind in _TYPES.items()))

    def decode(self, raw: RawDocuments) -> pa.RecordBatch:
        """The events of a batch; its schema is :data:`EVENT_SCHEMA`.

        :raises SourceProtocolError: these are no events.
        """
        try:
            _, made = decoded(self._codec, self._plan, raw)
            for name, one in zip(_TYPES, made, strict=True):
                if _has_conflict(one):
                    raise ValueError(f"its {name} is of another type")
        except ValueError as error:
            raise SourceProtocolError(
                f"An event of a change stream cannot be read: {error}.",
                next_step="Start the capture again; if it stops here again, look which version the server has.",
            ) from None
        columns: list[pa.Array] = []
        for kind, one in zip(_TYPES.values(), made, strict=True):
            found = array(kind, one)
            columns.extend(found.flatten() if kind.fields else [found])
        return pa.RecordBatch.from_arrays(columns, schema=EVENT_SCHEMA)


def _has_conflict(made: Made) -> bool:
    return bool(made[2]) or any(_has_conflict(child) for child in made[7])
