"""The vocabulary: epoch, barrier, vnode, op, chunk. Pure values; no I/O, no clock, no Spark.

Everything public is here; the modules behind it are one noun each.
"""

from __future__ import annotations

from headwater.stream.barrier import Barrier, BarrierKind
from headwater.stream.bitmap import VnodeBitmap
from headwater.stream.chunk import OP_COLUMN, Chunk
from headwater.stream.epoch import INVALID, ORIGIN, Epoch, EpochClock, EpochPair
from headwater.stream.errors import (
    BarrierError,
    BitmapError,
    ChunkError,
    EpochError,
    FormatError,
    KeyColumnError,
    KeyTypeError,
    VnodeCountError,
    VnodeRangeError,
)
from headwater.stream.mutation import (
    ALL_TARGETS,
    Mutation,
    Pause,
    Resnapshot,
    Resume,
    Throttle,
)
from headwater.stream.op import CHANGE_TYPES, Op, change_types_of, ops_of
from headwater.stream.vnode import (
    DEFAULT_VNODE_COUNT,
    MAX_VNODE_COUNT,
    check_vnode_count,
    hash_keys,
    vnodes_of,
)

__all__ = [
    "ALL_TARGETS",
    "CHANGE_TYPES",
    "DEFAULT_VNODE_COUNT",
    "INVALID",
    "MAX_VNODE_COUNT",
    "OP_COLUMN",
    "ORIGIN",
    "Barrier",
    "BarrierError",
    "BarrierKind",
    "BitmapError",
    "Chunk",
    "ChunkError",
    "Epoch",
    "EpochClock",
    "EpochError",
    "EpochPair",
    "FormatError",
    "KeyColumnError",
    "KeyTypeError",
    "Mutation",
    "Op",
    "Pause",
    "Resnapshot",
    "Resume",
    "Throttle",
    "VnodeBitmap",
    "VnodeCountError",
    "VnodeRangeError",
    "change_types_of",
    "check_vnode_count",
    "hash_keys",
    "ops_of",
    "vnodes_of",
]
