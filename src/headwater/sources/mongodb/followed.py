"""FollowedTables: the captured collections, and what events say of them.

======================================  ====================================================================
event                                   what is told
======================================  ====================================================================
insert                                  ``INSERT``
update, replace                         ``UPDATE_INSERT``, after an ``UPDATE_DELETE`` where the old document is known
update of a document that is gone       nothing: its delete follows; see :mod:`.lookup`
delete                                  ``DELETE``: the key alone, or the old document where it is known
drop, rename, dropDatabase              ``Stopped``
======================================  ====================================================================

The documents stay raw until they are decoded, all rows of a table at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import SchemaStopped
from headwater.sources.events import Changes, Event, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mongodb.documents.decoder import Conflict, DocumentDecoder
from headwater.sources.mongodb.lookup import Lookup
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import POSITION_TYPE, positions_of
from headwater.sources.table import SourceTable
from headwater.stream import Op

INSERT, UPDATE, REPLACE, DELETE, OTHER = range(5)
_KINDS: Final = pa.array(["insert", "update", "replace", "delete"])


class FollowedTables:
    """The captured *tables*.

    :param lookup: the documents of updates that come without one.
    :ivar conflicts: values that a column did not take and that are null, by table, since they were last looked at.
    """

    def __init__(self, tables: Iterable[SourceTable], policy: SchemaPolicy, lookup: Lookup) -> None:
        self._policy, self._lookup = policy, lookup
        self._tables: dict[CollectionName, SourceTable] = {}
        self._decoders: dict[CollectionName, DocumentDecoder] = {}
        self._from: dict[CollectionName, int] = {}
        self.conflicts: dict[str, list[Conflict]] = {}
        for table in tables:
            self.add(table, 0)

    @property
    def names(self) -> list[CollectionName]:
        return list(self._tables)

    def add(self, table: SourceTable, after: int) -> None:
        """Follow one more; changes up to the cluster time *after* are not of interest."""
        name = CollectionName(table.namespace, table.name)
        self._tables[name], self._from[name] = table, after
        self._decoders[name] = DocumentDecoder(table)

    def remove(self, table: SourceTable) -> None:
        self._forget(CollectionName(table.namespace, table.name))

    def _forget(self, name: CollectionName) -> None:
        self._tables.pop(name, None)
        self._decoders.pop(name, None)
        self._from.pop(name, None)

    # -- events ----------------------------------------------------------------------------------------------------

    def tell(self, batch: pa.RecordBatch, seq: int, events: list[Event]) -> int:
        """What *batch* says, in its order; its first row has number *seq* in its transaction.

        :return: the number that the next row of the last transaction has.
        :raises SchemaStopped: a table cannot go on, and the policy is to stop then.
        """
        kinds = _kinds(batch)
        doubled = (kinds == UPDATE) | (kinds == REPLACE)
        doubled &= _is_there(batch, "before")
        times = batch.column("cluster_time").to_numpy(zero_copy_only=False)
        first, following = _numbers(times, 1 + doubled, seq)
        begin = 0
        for place in [*np.flatnonzero(kinds == OTHER).tolist(), batch.num_rows]:
            if place > begin:
                cut = slice(begin, place)
                rows = _Rows(batch.slice(begin, place - begin), kinds[cut], doubled[cut], times[cut], first[cut])
                events.extend(self._changes(rows))
            if place < batch.num_rows:
                self._other(batch.slice(place, 1), int(times[place]), events)
            begin = place + 1
        return following

    def most_at_once(self, batch: pa.RecordBatch) -> int:
        """How many of the first events of *batch* may be told at once, because of the documents that they lack."""
        lacks = (_kinds(batch) == UPDATE) & ~_is_there(batch, "document")
        return max(1, int(np.searchsorted(np.cumsum(lacks), self._lookup.share, side="right")))

    def _changes(self, rows: _Rows) -> Iterator[Changes]:
        for name, chosen in rows.by_collection():
            table = self._tables.get(name)
            if table is None:
                continue
            after = self._from[name]
            if after and chosen.num_rows and chosen.times[0] <= after:
                chosen = chosen.where(chosen.times > after)
            lacks = (chosen.kinds != DELETE) & ~_is_there(chosen.batch, "document")
            for whole in self._looked_up(table, chosen, lacks) if lacks.any() else [chosen]:
                if whole.num_rows:
                    yield self._made(name, table, whole)

    def _looked_up(self, table: SourceTable, rows: _Rows, lacks: NDArray[np.bool_]) -> Iterator[_Rows]:
        """*rows* with the documents that they lack, without those whose document is gone; in pieces that fit."""
        while rows.num_rows:
            keys = rows.batch.column("key").filter(pa.array(lacks))
            if not len(keys):
                yield rows
                return
            found = self._lookup.documents(table, keys, int(rows.times[-1]))
            end = int(np.searchsorted(np.cumsum(lacks), len(found), side="right"))
            yield _filled(rows.slice(0, end), lacks[:end], found)
            rows, lacks = rows.slice(end, rows.num_rows), lacks[end:]

    def _made(self, name: CollectionName, table: SourceTable, rows: _Rows) -> Changes:
        of_event, is_old = rows.spread()
        kinds = rows.kinds[of_event]
        documents, keys_only = rows.documents(of_event, is_old)
        decoded = self._decoders[name].decode(documents)
        if decoded.conflicts:
            self.conflicts.setdefault(table.full_name, []).extend(decoded.conflicts)
        columns = list(decoded.batch.columns)
        if keys_only is not None:
            keep = pa.array(~keys_only)
            columns = [
                column if place in table.key_places else _kept(column, keep) for place, column in enumerate(columns)
            ]
        ops = np.where(kinds == INSERT, np.int8(Op.INSERT), np.int8(Op.UPDATE_INSERT))
        ops = np.where(kinds == DELETE, np.int8(Op.DELETE), ops)
        ops = np.where(is_old, np.int8(Op.UPDATE_DELETE), ops).astype(np.int8)
        seq = rows.first[of_event] + (rows.doubled[of_event] & ~is_old)
        made = pa.RecordBatch.from_arrays(
            [
                *columns,
                positions_of(rows.times[of_event], seq.astype(np.uint32)),
                rows.commit_times().take(pa.array(of_event)),
                pa.nulls(len(of_event), pa.string()),
            ],
            schema=table.log_schema(POSITION_TYPE),
        )
        return Changes(table, made, pa.array(ops))

    # -- collections that go ---------------------------------------------------------------------------------------

    def _other(self, event: pa.RecordBatch, time: int, events: list[Event]) -> None:
        row = event.select(["operation", "database", "collection", "to_database", "to_collection"]).to_pylist()[0]
        kind = row["operation"]
        name = CollectionName(row["database"] or "", row["collection"] or "")
        if kind == "dropDatabase":
            for known in [one for one in self._tables if one.namespace == name.namespace]:
                self._stop(known, time, "its database was dropped at the source.", events)
        elif kind == "drop":
            self._stop(name, time, "the collection was dropped at the source.", events)
        elif kind == "rename":
            now = CollectionName(row["to_database"] or "", row["to_collection"] or "")
            self._stop(name, time, f"the collection is called {now} at the source by now.", events)
            self._stop(now, time, f"another collection, {name}, took its name.", events)

    def _stop(self, name: CollectionName, time: int, change: str, events: list[Event]) -> None:
        known = self._tables.get(name)
        if known is None or time <= self._from[name]:
            return
        step = f"Run: headwater resnapshot {known.full_name}"
        if self._policy is SchemaPolicy.STOP:
            raise SchemaStopped(known.full_name, change, next_step=step)
        self._forget(name)
        events.append(Stopped(known, f"{change[0].upper()}{change[1:]} {step}"))


class _Rows:
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

    def where(self, keep: NDArray[np.bool_]) -> _Rows:
        chosen = self.batch.filter(pa.array(keep))
        return _Rows(chosen, self.kinds[keep], self.doubled[keep], self.times[keep], self.first[keep])

    def slice(self, start: int, stop: int) -> _Rows:
        cut = slice(start, stop)
        batch = self.batch.slice(start, stop - start)
        return _Rows(batch, self.kinds[cut], self.doubled[cut], self.times[cut], self.first[cut])

    def with_batch(self, batch: pa.RecordBatch) -> _Rows:
        return _Rows(batch, self.kinds, self.doubled, self.times, self.first)

    def by_collection(self) -> Iterator[tuple[CollectionName, _Rows]]:
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
        keys_only = (deletes & ~_is_there(batch, "before"))[of_event]
        source = np.where(is_old | deletes[of_event], count, 0)
        source = np.where(keys_only, 2 * count, source) + of_event
        together = pa.concat_arrays([batch.column(name) for name in ("document", "before", "key")])
        return together.take(pa.array(source)), keys_only if keys_only.any() else None

    def commit_times(self) -> pa.Array:
        """When each was committed, in microseconds."""
        return self.batch.column("wall_time").cast(pa.timestamp("us", tz="UTC"))


def _filled(rows: _Rows, lacks: NDArray[np.bool_], found: pa.BinaryArray) -> _Rows:
    """*rows* with the documents *found* for those that lack one, without those for which there is none."""
    place = rows.batch.schema.get_field_index("document")
    documents = pc.replace_with_mask(rows.batch.column(place), pa.array(lacks), found)
    whole = rows.with_batch(rows.batch.set_column(place, rows.batch.schema.field(place), documents))
    if not found.null_count:
        return whole
    gone = lacks.copy()
    gone[lacks] = found.is_null().to_numpy(zero_copy_only=False)
    return whole.where(~gone)


def _kinds(batch: pa.RecordBatch) -> NDArray[np.int8]:
    found = pc.fill_null(pc.index_in(batch.column("operation"), _KINDS), OTHER)
    kinds: NDArray[np.int8] = found.to_numpy(zero_copy_only=False).astype(np.int8)
    return kinds


def _is_there(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    there: NDArray[np.bool_] = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
    return there


def _numbers(times: NDArray[np.uint64], counts: NDArray[np.int64], seq: int) -> tuple[NDArray[np.int64], int]:
    """The number of the first row of each event among the rows of its time, and what the next one would have."""
    if not len(times):
        return np.empty(0, np.int64), seq
    before = np.cumsum(counts) - counts
    begins = np.append(True, times[1:] != times[:-1])
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    numbers = before - before[starts][run]
    numbers[run == 0] += seq
    return numbers, int(numbers[-1] + counts[-1])


def _kept(column: pa.Array, keep: pa.BooleanArray) -> pa.Array:
    """*column*, null where *keep* is not set."""
    if pa.types.is_nested(column.type):
        chosen = pc.if_else(keep, pa.array(np.arange(len(column))), pa.scalar(None, pa.int64()))
        return column.take(chosen)
    return pc.if_else(keep, column, pa.scalar(None, column.type))
