"""Which changes of a chunk are emitted while their table is backfilled. Pure, for all rows at once.

The key of a change tells its run, the run its rule, and with ``SINCE`` the position of the change tells whether the
snapshot has it. Both halves of an update have one key and one transaction, so they stay or go together; an update that
changed the key is a delete and an insert in the log, and each half follows the rule of its own key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.backfill.units import ChangeFilter, Rule
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import Cut, SplitKind
from headwater.sources.table import POSITION_COLUMN
from headwater.stream import OP_COLUMN, Op

_EPOCH, _SEQ = "_epoch", "_seq"


def mark_cdc_chunk(
    batch: pa.RecordBatch,
    kept: ChangeFilter,
    order: KeyOrder | None,
    key_columns: Sequence[str],
    truncated: tuple[int, int] | None = None,
) -> NDArray[np.bool_]:
    """For each change of *batch*: whether it is emitted.

    :param order: not needed where all keys have one rule (:func:`needs_order`).
    :param truncated: epoch and seq of a TRUNCATE: the table was empty there, so that all changes after it are emitted
        whatever was read before.
    """
    runs = kept.runs
    if order is None or not needs_order(kept):
        places = np.zeros(batch.num_rows, np.int64)
    else:
        cuts: list[Cut] = [run.end for run in runs if run.end is not None]
        places = order.places(batch.select(list(key_columns)), cuts)
    keep = np.array([run.rule is Rule.EMIT for run in runs])[places]
    for number, mark in enumerate(kept.marks):
        since = np.array([run.rule is Rule.SINCE and run.mark == number for run in runs])[places]
        if since.all():
            keep = ~mark.contains(batch.column(POSITION_COLUMN))
        elif since.any():
            chosen = np.flatnonzero(since)
            keep[chosen] = ~mark.contains(batch.column(POSITION_COLUMN).take(pa.array(chosen)))
    if truncated is not None:
        epoch, seq = truncated
        epochs = batch.column(_EPOCH).to_numpy()
        keep |= (epochs > epoch) | ((epochs == epoch) & (batch.column(_SEQ).to_numpy() >= seq))
    return keep


def needs_order(kept: ChangeFilter) -> bool:
    """Whether the rule of a change depends on its key."""
    return len(kept.runs) > 1 and kept.kind is SplitKind.KEY


def apply_filter(
    batch: pa.RecordBatch,
    kept: ChangeFilter,
    order: KeyOrder | None,
    key_columns: Sequence[str],
    truncated: tuple[int, int] | None = None,
) -> pa.RecordBatch:
    """The changes of *batch* that are emitted; half an update is a delete or an insert.

    :param truncated: see :func:`mark_cdc_chunk`.
    """
    return kept_rows(batch, mark_cdc_chunk(batch, kept, order, key_columns, truncated))


def kept_rows(batch: pa.RecordBatch, keep: NDArray[np.bool_]) -> pa.RecordBatch:
    """The changes of *batch* for which *keep* says so; half an update is a delete or an insert."""
    if not keep.any():
        return batch.slice(0, 0)
    ops = batch.column(OP_COLUMN).to_numpy()
    whole = without_broken_pairs(ops, keep)
    if whole is not ops:
        place = batch.schema.get_field_index(OP_COLUMN)
        batch = batch.set_column(place, batch.schema.field(place), pa.array(whole, pa.int8()))
    return batch if keep.all() else batch.filter(pa.array(keep))


def without_broken_pairs(ops: NDArray[np.int8], keep: NDArray[np.bool_]) -> NDArray[np.int8]:
    """*ops* where a kept half of an update, whose other half is not kept or not there, is a delete or an insert.

    An ``UPDATE_INSERT`` that stood alone before stays.
    """
    opens = ops == Op.UPDATE_DELETE
    if not opens.any():
        return ops
    followed = opens & np.append(ops[1:] == Op.UPDATE_INSERT, False)
    lone = keep & opens & ~(followed & np.append(keep[1:], False))
    firsts = np.flatnonzero(followed[:-1] & ~keep[:-1] & keep[1:])
    if not lone.any() and not firsts.size:
        return ops
    ops = ops.copy()
    ops[lone] = Op.DELETE
    ops[firsts + 1] = Op.INSERT
    return ops
