"""Batch: what of a staged batch a sink does not have yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.log_store.columns import EPOCH
from headwater.sinks.errors import OtherAttempt, SinkFenced
from headwater.sinks.sink import Committed, Staged, Token
from headwater.sources.table import SourceTable
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT


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
        if any(has.epoch > one.detail["after"] for one in changes):
            raise OtherAttempt(
                "The sink took a part of this batch from another process while it was staged.",
                next_step="Start the query again, once: two processes ran it.",
            )
        truncated = any(one.truncated and one.detail["truncated"][0] > has.epoch for one in changes)
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


def rows_after(batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """The rows of a log that are of later epochs."""
    later = batch.column(EPOCH).to_numpy() > np.uint64(epoch)
    return batch if later.all() else batch.filter(pa.array(later))


def truncated_us(changes: Sequence[Staged], first_us: Iterable[int | None]) -> int:
    """When the table was truncated: at its epoch, and not after what came after it. The log does not tell more.

    :param first_us: the time of the first row of each of *changes*, if it has any.
    """
    epoch = max(int(one.detail["truncated"][0]) for one in changes if one.truncated)
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
