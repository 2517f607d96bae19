"""EventRows: the events of a batch that are changes of documents, and the rows that they make. Pure.

An update whose old document is known makes two rows, each with a number of its own in its transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import seen_codes, token_text

INSERT, UPDATE, REPLACE, DELETE, OTHER = range(5)
_KINDS: Final = pa.array(["insert", "update", "replace", "delete"])


class EventRows:
    """Events that are changes of documents.

    :ivar first: the number in its transaction that the first row of each has. :ivar doubled: it makes two rows.
    """

    __slots__ = ("batch", "doubled", "first", "kinds", "times")

    def __init__(
        self,
        batch: pa.RecordBatch,
        kinds: NDArray[np.int8],
        doubled: NDArray[np.bool_],
        times: NDArray[np.uint64],
        first: NDArray[np.int64],
    ) -> None:
        self.batch, self.kinds, self.doubled, self.times, self.first = batch, kinds, doubled, times, first

    @property
    def num_rows(self) -> int:
        return len(self.kinds)

    def where(self, keep: NDArray[np.bool_]) -> EventRows:
        chosen = self.batch.filter(pa.array(keep))
        return EventRows(chosen, self.kinds[keep], self.doubled[keep], self.times[keep], self.first[keep])

    def slice(self, start: int, stop: int) -> EventRows:
        cut = slice(start, stop)
        batch = self.batch.slice(start, stop - start)
        return EventRows(batch, self.kinds[cut], self.doubled[cut], self.times[cut], self.first[cut])

    def with_batch(self, batch: pa.RecordBatch) -> EventRows:
        return EventRows(batch, self.kinds, self.doubled, self.times, self.first)

    def by_collection(self) -> Iterator[tuple[CollectionName, EventRows]]:
        """The events of each collection."""
        batch = self.batch
        codes = [batch.column(name).dictionary_encode() for name in ("database", "collection")]
        spaces, names = (code.dictionary.to_pylist() for code in codes)
        if len(spaces) == 1 and len(names) == 1:
            yield CollectionName(spaces[0], names[0]), self
            return
        both = codes[0].indices.to_numpy().astype(np.int64) * len(names) + codes[1].indices.to_numpy()
        for one in np.unique(both).tolist():
            yield CollectionName(spaces[one // len(names)], names[one % len(names)]), self.where(both == one)

    def spread(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For each row that is told: its event, and whether it is the old row of an update."""
        of_event = np.repeat(np.arange(self.num_rows), 1 + self.doubled)
        is_old = np.zeros(len(of_event), np.bool_)
        is_old[:-1] = of_event[:-1] == of_event[1:]
        return of_event, is_old

    def documents(
        self, of_event: NDArray[np.int64], is_old: NDArray[np.bool_]
    ) -> tuple[pa.Array, NDArray[np.bool_] | None]:
        """The raw document of each row, and which of them have only the key; ``None``: none."""
        batch, count = self.batch, self.num_rows
        deletes = self.kinds == DELETE
        if not deletes.any() and len(of_event) == count:
            return batch.column("document"), None
        keys_only = (deletes & ~is_there(batch, "before"))[of_event]
        source = np.where(is_old | deletes[of_event], count, 0)
        source = np.where(keys_only, 2 * count, source) + of_event
        together = pa.concat_arrays([batch.column(name) for name in ("document", "before", "key")])
        return together.take(pa.array(source)), keys_only if keys_only.any() else None

    def seen(self, of_event: NDArray[np.int64]) -> NDArray[np.uint32] | None:
        """How long before readers saw them, for ``_position``; ``None``: they never did."""
        commits = self.batch.column("commit_time")
        if commits.null_count == self.num_rows:
            return None
        known = pc.coalesce(commits, self.batch.column("cluster_time")).to_numpy(zero_copy_only=False)
        return seen_codes(self.times, known)[of_event]

    def commit_times(self) -> pa.Array:
        """When each was committed, in microseconds."""
        return self.batch.column("wall_time").cast(pa.timestamp("us", tz="UTC"))


def filled(rows: EventRows, lacks: NDArray[np.bool_], found: pa.BinaryArray) -> EventRows:
    """*rows* with the documents *found* for those that lack one, without those for which there is none."""
    place = rows.batch.schema.get_field_index("document")
    documents = pc.replace_with_mask(rows.batch.column(place), pa.array(lacks), found)
    whole = rows.with_batch(rows.batch.set_column(place, rows.batch.schema.field(place), documents))
    if not found.null_count:
        return whole
    gone = lacks.copy()
    gone[lacks] = found.is_null().to_numpy(zero_copy_only=False)
    return whole.where(~gone)


def kinds_of(batch: pa.RecordBatch) -> NDArray[np.int8]:
    found = pc.fill_null(pc.index_in(batch.column("operation"), _KINDS), OTHER)
    kinds: NDArray[np.int8] = found.to_numpy(zero_copy_only=False).astype(np.int8)
    return kinds


def change_places(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Which events are changes of documents."""
    return np.flatnonzero(kinds_of(batch) != OTHER)


def token_of(batch: pa.RecordBatch, place: int) -> str:
    """The resume token of one event, as a text."""
    return token_text(
        {"_data": batch.column("token")[place].as_py(), "_typeBits": batch.column("type_bits")[place].as_py()}
    )


def is_there(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    there: NDArray[np.bool_] = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
    return there


def numbers(times: NDArray[np.uint64], counts: NDArray[np.int64], seq: int) -> tuple[NDArray[np.int64], int]:
    """The number of the first row of each event among the rows of its time, and what the next one would have."""
    if not len(times):
        return np.empty(0, np.int64), seq
    before = np.cumsum(counts) - counts
    begins = np.append(True, times[1:] != times[:-1])
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    found = before - before[starts][run]
    found[run == 0] += seq
    return found, int(found[-1] + counts[-1])


def kept(column: pa.Array, keep: pa.BooleanArray) -> pa.Array:
    """*column*, null where *keep* is not set."""
    if pa.types.is_nested(column.type):
        chosen = pc.if_else(keep, pa.array(np.arange(len(column))), pa.scalar(None, pa.int64()))
        return column.take(chosen)
    return pc.if_else(keep, column, pa.scalar(None, column.type))
