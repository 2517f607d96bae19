"""Batch: what of a staged batch a sink does not have yet, and which of its rows a part of history replaces. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.columns import EPOCH
from headwater.sinks.errors import OtherAttempt, SinkFenced, SinkInputError
from headwater.sinks.sink import Committed, HistoryPart, Staged, Token
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT
from headwater.stream.vnode import hash_keys
from headwater.versioned.fitting import cast


@dataclass(frozen=True, slots=True)
class Held:
    """What the tokens of a table say.

    :ivar is_upsert: there were rows before this backfill. :ivar generation: the oldest that may commit.
    :ivar has_history: rows of this backfill were committed.
    """

    committed: Committed = field(default_factory=Committed)
    is_upsert: bool = False
    generation: int = 0
    has_history: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What is left of a batch."""

    changes: tuple[Staged, ...]
    history: tuple[Staged, ...]
    is_truncated: bool = False

    @classmethod
    def left_of(cls, staged: Sequence[Staged], token: Token, has: Committed) -> Batch | None:
        """``None``: the sink has all of it.

        :raises OtherAttempt: it has the history from another attempt, or changes that it did not have when this batch
            was staged.
        """
        history = tuple(one for one in staged if one.is_snapshot)
        changes = tuple(one for one in staged if not one.is_snapshot)
        if history and has.plan == token.plan and has.attempt != token.attempt:
            raise OtherAttempt(
                f"Plan {token.plan} was committed by attempt {has.attempt}; this is attempt {token.attempt}.",
                next_step="Start the query again: it goes on from what the sink has.",
            )
        if has.plan >= token.plan:
            history = ()
        if has.epoch >= token.epoch:
            changes = ()
        if any(one.after is not None and has.epoch > one.after for one in changes):
            raise OtherAttempt(
                "The sink took a part of this batch from another process while it was staged.",
                next_step="Start the query again, once: two processes ran it.",
            )
        truncated = any(one.truncated is not None and one.truncated[0] > has.epoch for one in changes)
        return cls(changes, history, truncated) if changes or history else None

    @property
    def all(self) -> tuple[Staged, ...]:
        return (*self.changes, *self.history)

    @property
    def has_changes(self) -> bool:
        return self.is_truncated or any(one.rows for one in self.changes)

    @property
    def is_empty(self) -> bool:
        return not self.history and not self.has_changes


class KnownRows:
    """Separates rows whose keys may be in the table already from the others.

    :param keys: its key columns. :param changed: the hashes of keys that may be there.
    :ivar rows: these, as far as :meth:`others` has come.
    """

    def __init__(self, keys: Sequence[str], changed: Any) -> None:
        self._keys = keys
        self._changed = None if changed is None else np.sort(np.asarray(changed, np.uint64))
        self.rows: list[pa.RecordBatch] = []

    def others(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._changed is not None and self._changed.size:
                hashes = hash_keys(batch, self._keys)
                indexes = np.minimum(np.searchsorted(self._changed, hashes), self._changed.size - 1)
                is_known = self._changed[indexes] == hashes
                if is_known.any():
                    self.rows.append(batch.filter(pa.array(is_known)))
                    batch = batch.filter(pa.array(~is_known))
            yield batch


def rows_after(batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """The rows of a log that are of later epochs."""
    later = batch.column(EPOCH).to_numpy() > np.uint64(epoch)
    return batch if later.all() else batch.filter(pa.array(later))


def truncated_us(changes: Sequence[Staged], first_us: Iterable[int | None]) -> int:
    """When the table was truncated: at its epoch, and not after what came after it. The log does not tell more.

    :param first_us: the time of the first row of each of *changes*, if it has any.
    """
    epoch = max(one.truncated[0] for one in changes if one.truncated is not None)
    at_us = ((epoch >> PHYSICAL_SHIFT) + ORIGIN_UNIX_MS) * 1000
    return min([at_us, *(first for first in first_us if first is not None)])


def refuse_late(table: SourceTable, token: Token, generation: int) -> None:
    """:param generation: the oldest that may commit. :raises SinkFenced: *token* is of an earlier one."""
    if token.generation < generation:
        raise SinkFenced(
            f"Query {token.query!r} was started again elsewhere: this batch is of generation {token.generation}, "
            f"generation {generation} delivers {table.full_name}.",
            next_step="No action needed: the later process delivers.",
        )


def is_all(ranges: Sequence[KeyRange]) -> bool:
    """One of them has every key."""
    return any(one.start is None and one.end is None for one in ranges)


def replaced_ranges(table: SourceTable, part: HistoryPart) -> tuple[KeyRange, ...]:
    """The ranges that *part* replaces. :raises SinkInputError: which rows lie in them is unknown."""
    if not is_all(part.ranges) and (part.kind is not SplitKind.KEY or part.order is None):
        raise SinkInputError(
            f"Parts of {table.full_name} that are not ranges of its key cannot be replaced.",
            next_step="Take a new snapshot of the whole table.",
        )
    return part.ranges


def in_ranges(staged: Staged, keys: Sequence[pa.ChunkedArray]) -> NDArray[np.bool_]:
    """Which rows lie in the ranges of *staged*, given a column for each key column of its table, as the sink has it."""
    rows, ranges = len(keys[0]), staged.ranges or ()
    if is_all(ranges):
        return np.ones(rows, np.bool_)
    assert staged.order is not None
    names = list(staged.table.key_columns)
    columns = zip(names, keys, strict=True)
    typed = pa.table([cast(values, staged.table.column(name).type) for name, values in columns], names)
    batches = typed.combine_chunks().to_batches()
    within = np.zeros(rows, np.bool_)
    for one in ranges:
        cuts = [cut for cut in (one.start, one.end) if cut is not None]
        places = [staged.order.places(batch, cuts) for batch in batches]
        within |= np.concatenate(places or [np.zeros(0, np.int64)]) == (0 if one.start is None else 1)
    return within
