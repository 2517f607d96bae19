"""FollowedTables: the captured collections, and what events say of them.

======================================  ====================================================================
event                                   what is told
======================================  ====================================================================
insert                                  ``INSERT``
update, replace                         ``UPDATE_INSERT``, after an ``UPDATE_DELETE`` where the old document is known
update of a document that is gone       nothing: its delete follows; see :mod:`.lookup`
delete                                  ``DELETE``: the key alone, or the old document where it is known
delete on one shard of a document       nothing: an insert on another one was told, or follows
that a transaction moved
drop, rename, dropDatabase              ``Stopped``; to be read again where another collection has its name now
reshardCollection                       ``Stopped``, to be read again
======================================  ====================================================================

The documents stay raw until they are decoded, all rows of a table at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import RefusedValue, RereadNeeded, SchemaStopped
from headwater.sources.events import Changes, Event, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mongodb.documents.decoder import Conflict, Decoded, DocumentDecoder, RawDocuments
from headwater.sources.mongodb.event_rows import (
    DELETE,
    INSERT,
    OTHER,
    REPLACE,
    UPDATE,
    EventRows,
    filled,
    is_there,
    kept,
    kinds_of,
    numbers,
)
from headwater.sources.mongodb.lookup import Lookup
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import POSITION_TYPE, positions_of
from headwater.sources.special_values import as_policy, told_before
from headwater.sources.table import SourceTable, SpecialValues
from headwater.sources.unavailable import with_parked
from headwater.stream import Op


class FollowedTables:
    """The captured *tables*.

    :param lookup: the documents of updates that come without one.
    :param after: by collection: changes up to this cluster time are not of interest.
    :param is_sharded: documents may move from shard to shard.
    :param is_present: whether a collection of this name exists now that can be captured.
    :ivar conflicts: values that a column did not take and that are null, by table, since they were last looked at.
    """

    def __init__(
        self,
        tables: Iterable[SourceTable],
        policy: SchemaPolicy,
        lookup: Lookup,
        after: Mapping[CollectionName, int] | None = None,
        *,
        is_sharded: bool = False,
        is_present: Callable[[CollectionName], bool] = lambda _: False,
    ) -> None:
        self._is_present = is_present
        self._policy, self._lookup, self._is_sharded = policy, lookup, is_sharded
        self._tables: dict[CollectionName, SourceTable] = {}
        self._decoders: dict[CollectionName, DocumentDecoder] = {}
        self._from: dict[CollectionName, int] = {}
        self.conflicts: dict[str, list[Conflict]] = {}
        for table in tables:
            self.add(table, (after or {}).get(CollectionName(table.namespace, table.name), 0))

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
        kinds = kinds_of(batch)
        doubled = (kinds == UPDATE) | (kinds == REPLACE)
        doubled &= is_there(batch, "before")
        times = batch.column("cluster_time").to_numpy(zero_copy_only=False)
        first, following = numbers(times, 1 + doubled, seq)
        begin = 0
        for place in [*np.flatnonzero(kinds == OTHER).tolist(), batch.num_rows]:
            if place > begin:
                cut = slice(begin, place)
                rows = EventRows(batch.slice(begin, place - begin), kinds[cut], doubled[cut], times[cut], first[cut])
                events.extend(self._changes(rows))
            if place < batch.num_rows:
                self._other(batch.slice(place, 1), int(times[place]), events)
            begin = place + 1
        return following

    def most_at_once(self, batch: pa.RecordBatch) -> int:
        """How many of the first events of *batch* may be told at once, because of the documents that they lack."""
        lacks = (kinds_of(batch) == UPDATE) & ~is_there(batch, "document")
        lacks |= self._may_have_moved(kinds_of(batch), batch)
        return max(1, int(np.searchsorted(np.cumsum(lacks), self._lookup.share, side="right")))

    def _changes(self, rows: EventRows) -> Iterator[Changes | Stopped]:
        for name, chosen in rows.by_collection():
            table = self._tables.get(name)
            if table is None:
                continue
            after = self._from[name]
            if after and chosen.num_rows and chosen.times[0] <= after:
                chosen = chosen.where(chosen.times > after)
            chosen = self._without_moved(table, chosen)
            lacks = (chosen.kinds != DELETE) & ~is_there(chosen.batch, "document")
            for whole in self._looked_up(table, chosen, lacks) if lacks.any() else [chosen]:
                if whole.num_rows and name in self._tables:
                    yield from self._told(name, table, whole)

    def _may_have_moved(self, kinds: NDArray[np.int8], batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Deletes that may be the one half of an update of a shard key."""
        if not self._is_sharded:
            return np.zeros(len(kinds), np.bool_)
        found: NDArray[np.bool_] = (kinds == DELETE) & is_there(batch, "transaction")
        return found

    def _without_moved(self, table: SourceTable, rows: EventRows) -> EventRows:
        """*rows* without the deletes of transactions whose documents are there.

        An update of a shard key is a delete on one shard and an insert on another, each at a time of its own, and the
        insert may come first: whoever followed the delete then would lose the document. It need not show in the key
        that was deleted, which lacks the fields that the document had not. Where the document is there, its insert was
        told or follows.
        """
        places = np.flatnonzero(self._may_have_moved(rows.kinds, rows.batch))
        gone = np.zeros(rows.num_rows, np.bool_)
        keys = rows.batch.column("key").take(pa.array(places))
        while len(keys):
            found = self._lookup.documents(table, keys, int(rows.times[-1]))
            gone[places[: len(found)][found.is_valid().to_numpy(zero_copy_only=False)]] = True
            places, keys = places[len(found) :], keys.slice(len(found))
        return rows.where(~gone) if gone.any() else rows

    def _looked_up(self, table: SourceTable, rows: EventRows, lacks: NDArray[np.bool_]) -> Iterator[EventRows]:
        """*rows* with the documents that they lack, without those whose document is gone; in pieces that fit."""
        while rows.num_rows:
            keys = rows.batch.column("key").filter(pa.array(lacks))
            if not len(keys):
                yield rows
                return
            found = self._lookup.documents(table, keys, int(rows.times[-1]))
            end = int(np.searchsorted(np.cumsum(lacks), len(found), side="right"))
            yield filled(rows.slice(0, end), lacks[:end], found)
            rows, lacks = rows.slice(end, rows.num_rows), lacks[end:]

    def _told(self, name: CollectionName, table: SourceTable, rows: EventRows) -> Iterator[Changes | Stopped]:
        """*rows*; where a value is refused, the transactions before it, and that the table stops."""
        try:
            yield self._made(name, table, rows)
        except RefusedValue as error:
            ends = [0, *(np.flatnonzero(np.diff(rows.times)) + 1).tolist()]
            end = told_before(ends, lambda end: self._decoded(name, rows.slice(0, end)))
            if end:
                yield self._made(name, table, rows.slice(0, end))
            self._forget(name)
            yield Stopped.by(table, error)

    def _decoded(self, name: CollectionName, rows: EventRows) -> Decoded:
        return self._decoders[name].decode(rows.documents(*rows.spread())[0])

    def _made(self, name: CollectionName, table: SourceTable, rows: EventRows) -> Changes:
        of_event, is_old = rows.spread()
        kinds = rows.kinds[of_event]
        documents, keys_only = rows.documents(of_event, is_old)
        decoded = self._decoders[name].decode(documents)
        if decoded.conflicts:
            self.conflicts.setdefault(table.full_name, []).extend(decoded.conflicts)
        columns = list(decoded.batch.columns)
        parked = self._parked(table, documents, decoded) if decoded.conflicts and table.parking else {}
        if keys_only is not None:
            keep = pa.array(~keys_only)
            columns = [
                column if place in table.key_places else kept(column, keep) for place, column in enumerate(columns)
            ]
        ops = np.where(kinds == INSERT, np.int8(Op.INSERT), np.int8(Op.UPDATE_INSERT))
        ops = np.where(kinds == DELETE, np.int8(Op.DELETE), ops)
        ops = np.where(is_old, np.int8(Op.UPDATE_DELETE), ops).astype(np.int8)
        seq = rows.first[of_event] + (rows.doubled[of_event] & ~is_old)
        made = pa.RecordBatch.from_arrays(
            [
                *columns,
                positions_of(rows.times[of_event], seq.astype(np.uint32), rows.seen(of_event)),
                rows.commit_times().take(pa.array(of_event)),
                with_parked(
                    pa.nulls(len(of_event), pa.string()),
                    {one: mask & ~is_old & (kinds != DELETE) for one, mask in parked.items()},
                ),
            ],
            schema=table.log_schema(POSITION_TYPE),
        )
        return Changes(table, made, pa.array(ops))

    def _parked(self, table: SourceTable, documents: RawDocuments, decoded: Decoded) -> dict[str, NDArray[np.bool_]]:
        """Where each column that parks has a special value: it is null, and its text is not."""
        texts = DocumentDecoder(as_policy(table, SpecialValues.TEXT)).decode(documents).batch
        found: dict[str, NDArray[np.bool_]] = {}
        for column in table.parking:
            text = texts.column(column.name)
            is_value = pc.fill_null(pc.not_equal(text, "null"), False)
            special = pc.and_(decoded.batch.column(column.name).is_null(), is_value)
            found[column.name] = special.to_numpy(zero_copy_only=False)
        return found

    # -- collections that go ---------------------------------------------------------------------------------------

    def _other(self, event: pa.RecordBatch, time: int, events: list[Event]) -> None:
        row = event.select(["operation", "database", "collection", "to_database", "to_collection"]).to_pylist()[0]
        kind = row["operation"]
        name = CollectionName(row["database"] or "", row["collection"] or "")
        if kind == "dropDatabase":
            for known in [one for one in self._tables if one.namespace == name.namespace]:
                self._stop(known, time, "its database was dropped at the source.", events, "Create it again")
        elif kind == "drop":
            self._stop(name, time, "the collection was dropped at the source.", events, "Create it again")
        elif kind == "reshardCollection":  # told where expanded events are, see Server.commit_options
            self._stop(name, time, "the collection was resharded, or moved, at the source.", events)
        elif kind == "rename":
            now = CollectionName(row["to_database"] or "", row["to_collection"] or "")
            away, advice = (
                f"the collection is called {now} at the source now.",
                f"Capture {now} instead, or rename it back",
            )
            self._stop(name, time, away, events, advice)
            self._stop(now, time, f"another collection, {name}, took its name.", events)

    def _stop(self, name: CollectionName, time: int, change: str, events: list[Event], advice: str = "") -> None:
        """:param advice: what to do where no collection has the name now; empty where one has."""
        known = self._tables.get(name)
        if known is None or time <= self._from[name]:
            return
        error: SchemaStopped = RereadNeeded(known.full_name, change)
        if advice and not self._is_present(name):
            step = f"{advice}, then run: headwater resnapshot {known.full_name}"
            error = SchemaStopped(known.full_name, change, next_step=step)
        if self._policy is SchemaPolicy.STOP:
            raise error
        self._forget(name)
        events.append(Stopped.by(known, error))
