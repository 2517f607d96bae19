"""EventBatches: the events of a change stream as Arrow batches, those that came in parts put together again.

An event of more than 16 MB comes as several, each with some of its fields (``$changeStreamSplitLargeEvent``).
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from headwater.sources.mongodb.documents.decoder import RawArray
from headwater.sources.mongodb.documents.events import EVENT_SCHEMA, EventDecoder

_FRAGMENT: Final = EVENT_SCHEMA.get_field_index("fragment")
_FRAGMENTS: Final = EVENT_SCHEMA.get_field_index("fragments")


class EventBatches:
    """Decodes the answers of one stream, in their order."""

    def __init__(self) -> None:
        self._decoder = EventDecoder()
        self._parts: list[pa.RecordBatch] = []

    def decode(self, array: memoryview) -> pa.RecordBatch:
        """The whole events of an answer. :raises SourceProtocolError: these are no events."""
        made = self._decoder.decode(RawArray(array))
        if made.column(_FRAGMENT).null_count == made.num_rows and not self._parts:
            return made
        return self._joined(made)

    def _joined(self, made: pa.RecordBatch) -> pa.RecordBatch:
        rows: list[pa.RecordBatch] = []
        fragments, counts = made.column(_FRAGMENT).to_pylist(), made.column(_FRAGMENTS).to_pylist()
        for place, (fragment, count) in enumerate(zip(fragments, counts, strict=True)):
            row = made.slice(place, 1)
            if fragment is None:
                rows.append(row)
                continue
            self._parts.append(row)
            if fragment == count:
                rows.append(_whole(self._parts))
                self._parts = []
        if not rows:
            return made.slice(0, 0)
        return pa.Table.from_batches(rows, EVENT_SCHEMA).combine_chunks().to_batches()[0]


def _whole(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One event of its parts: each field is in one of them; the token is that of the last."""
    columns = []
    for place, field in enumerate(EVENT_SCHEMA):
        known = [part.column(place) for part in reversed(parts) if part.column(place).null_count == 0]
        is_number = place in (_FRAGMENT, _FRAGMENTS)
        columns.append(pa.nulls(1, field.type) if is_number or not known else known[0])
    return pa.RecordBatch.from_arrays(columns, schema=EVENT_SCHEMA)
