"""Which changes of a log are delivered while the snapshot of their table is read, for all rows at once. Pure.

Each part of the snapshot is read at an epoch. A change counts where the part of its key is delivered, or is in the same
batch, and its epoch is after that of the part: earlier changes are in the rows of the part. Changes of parts that are
not handed out are left out: a later part has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.backfill.cdc.mark import kept_rows
from headwater.backfill.snapshot.parts import VnodeFilter, VnodePart
from headwater.log_store.columns import EPOCH, VNODE
from headwater.stream import vnodes_of
from headwater.versioned.key_positions import keys
from headwater.versioned.log_rows import VNODES


def mark_chunk(
    batch: pa.RecordBatch, handed_out: VnodeFilter, vnodes: NDArray[np.uint16], key_columns: Sequence[str]
) -> NDArray[np.bool_]:
    """For each change of *batch*, whose keys are in *vnodes*: whether it is delivered."""
    epochs = batch.column(EPOCH).to_numpy()
    keep = np.zeros(batch.num_rows, np.bool_)
    for part, epoch in handed_out.parts:
        chosen = (vnodes >= part.first) & (vnodes < part.end) & (epochs > epoch)
        if not part.is_whole and chosen.any():
            places = np.flatnonzero(chosen)
            some = batch.select(list(key_columns)).take(pa.array(places))
            chosen[places] = _within(keys(some, key_columns), part)
        keep |= chosen
    return keep


def _within(positions: pa.BinaryArray, part: VnodePart) -> NDArray[np.bool_]:
    inside = np.ones(len(positions), np.bool_)
    if part.start is not None:
        inside &= pc.greater_equal(positions, pa.scalar(part.start, positions.type)).to_numpy(zero_copy_only=False)
    if part.stop is not None:
        inside &= pc.less(positions, pa.scalar(part.stop, positions.type)).to_numpy(zero_copy_only=False)
    return inside


def apply_mark(
    batch: pa.RecordBatch, handed_out: VnodeFilter, vnode_count: int, key_columns: Sequence[str]
) -> pa.RecordBatch:
    """The changes of *batch* that are delivered; half an update is a delete or an insert.

    :param vnode_count: of the log; where it is not that of versioned tables the vnodes are computed.
    """
    vnodes = batch.column(VNODE) if vnode_count == VNODES else vnodes_of(batch, key_columns, VNODES)
    return kept_rows(batch, mark_chunk(batch, handed_out, vnodes.to_numpy(), key_columns))
