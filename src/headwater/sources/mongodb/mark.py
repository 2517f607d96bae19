"""MongoMark: what a snapshot contains: everything up to one cluster time, and nothing after it. Pure.

Anybody who reads at that time (``readConcern: snapshot``, ``atClusterTime``) sees the same documents, on any machine,
for as long as the server keeps them: no transaction is held open.

The JSON form::

    {"MongoDb": {"at": {"ordinal": 4, "seconds": 1794848883}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidOffset
from headwater.sources.mongodb.offset import POSITION_DTYPE, MongoOffset


@dataclass(frozen=True, slots=True)
class MongoMark:
    """What a snapshot at one cluster time contains."""

    at: MongoOffset

    @property
    def low(self) -> MongoOffset:
        """Everything that committed before it is in the snapshot."""
        return self.at

    @property
    def high(self) -> MongoOffset:
        """Nothing that committed after it is in the snapshot."""
        return self.at

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """For each ``_position`` of a change: whether the snapshot has it already."""
        data = positions.buffers()[1]
        if data is None or not len(positions):
            return np.zeros(0, np.bool_)
        rows = np.frombuffer(data, POSITION_DTYPE, len(positions), positions.offset * POSITION_DTYPE.itemsize)
        contained: NDArray[np.bool_] = rows["time"].astype(np.uint64) <= np.uint64(self.at.time)
        return contained

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes, all logged before the snapshot was taken, that it does not show yet."""
        unseen: NDArray[np.bool_] = ~self.contains(positions)
        return unseen

    def to_json(self) -> str:
        return json.dumps({"MongoDb": {"at": self.at.to_fields()}}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MongoMark:
        """What :meth:`to_json` keeps beneath the kind. :raises InvalidOffset: it is not that."""
        at = fields.get("at")
        if not isinstance(at, dict):
            raise InvalidOffset("A mark of MongoDB has no place.", next_step="Give the text that to_json() wrote.")
        return cls(MongoOffset.from_fields(at))
