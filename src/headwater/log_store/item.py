"""What a reader yields, and what it remembers of it until it is truncated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.offset import LogOffset
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.stream import Chunk, Epoch, VnodeBitmap


@dataclass(frozen=True, slots=True, eq=False)
class ChunkItem:
    """Rows of one epoch."""

    epoch: Epoch
    chunk_id: int
    chunk: Chunk

    @property
    def offset(self) -> LogOffset:
        return LogOffset(self.epoch, self.chunk_id)


@dataclass(frozen=True, slots=True, eq=False)
class BarrierItem:
    """The end of one epoch.

    :ivar is_drain: the writer waits until this barrier is truncated.
    """

    epoch: Epoch
    is_checkpoint: bool
    is_stop: bool = False
    schema_change: pa.Schema | None = None
    new_vnode_bitmap: VnodeBitmap | None = None
    is_drain: bool = False

    @property
    def offset(self) -> LogOffset:
        return LogOffset(self.epoch)

    @property
    def forces_commit(self) -> bool:
        """Whether a sink that commits every few checkpoints must commit at this one."""
        changed = self.new_vnode_bitmap is not None or self.schema_change is not None
        return self.is_checkpoint and (changed or self.is_stop or self.is_drain)


LogItem: TypeAlias = ChunkItem | BarrierItem


@dataclass(frozen=True, slots=True)
class Done:
    """What truncating one item says of the vnodes: rows up to a seq id, or (``seqs`` is ``None``) the whole epoch."""

    epoch: Epoch
    vnodes: VnodeBitmap
    seqs: dict[int, int] | None

    def apply_to(self, progress: LogStoreVnodeProgress, owned: VnodeBitmap | None) -> None:
        """Move *progress*, for the vnodes of *owned* only."""
        if self.seqs is not None:
            mine = {vnode: seq for vnode, seq in self.seqs.items() if owned is None or vnode in owned}
            progress.apply_per_vnode(self.epoch, mine)
        else:
            progress.apply_ended(self.vnodes if owned is None else self.vnodes & owned, self.epoch)


def last_seqs(vnodes: NDArray[np.uint16], seqs: NDArray[np.uint32]) -> dict[int, int]:
    """The highest seq id of each vnode."""
    order = np.lexsort((seqs, vnodes))
    sorted_vnodes = vnodes[order]
    last = np.flatnonzero(np.append(sorted_vnodes[1:] != sorted_vnodes[:-1], True)) if len(order) else order
    return dict(zip(sorted_vnodes[last].tolist(), seqs[order][last].tolist(), strict=True))
