"""MongoMark: what a snapshot contains: everything up to one cluster time, and nothing after it. Pure.

Anybody who reads at that time (``readConcern: snapshot``, ``atClusterTime``) sees the same documents, on any machine,
for as long as the server keeps them: no transaction is held open.

Shards write a transaction over several of them into their logs when readers have seen it for a moment (see
:mod:`.offset`). A snapshot may have been taken in that moment: then changes that it has come after it in the log, up to
*until*.

The JSON form, *until* only where it is another place::

    {"MongoDb": {"at": {"ordinal": 4, "seconds": 1794848883}, "until": {"ordinal": 1, "seconds": 1794848884}}}
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
from headwater.sources.mongodb.offset import POSITION_DTYPE, MongoOffset, seen_times


@dataclass(frozen=True, slots=True)
class MongoMark:
    """What a snapshot at one cluster time contains.

    :ivar until: no change after this place is in it; ``None``: none after *at*.
    """

    at: MongoOffset
    until: MongoOffset | None = None

    @property
    def low(self) -> MongoOffset:
        """Everything that committed before it is in the snapshot."""
        return self.at

    @property
    def high(self) -> MongoOffset:
        """Nothing that comes after it in the log is in the snapshot."""
        return self.until or self.at

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """For each ``_position`` of a change: whether the snapshot has it already."""
        data = positions.buffers()[1]
        if data is None or not len(positions):
            return np.zeros(0, np.bool_)
        rows = np.frombuffer(data, POSITION_DTYPE, len(positions), positions.offset * POSITION_DTYPE.itemsize)
        contained: NDArray[np.bool_] = seen_times(rows) <= np.uint64(self.at.time)
        return contained

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes, all logged before the snapshot was taken, that it does not show yet."""
        unseen: NDArray[np.bool_] = ~self.contains(positions)
        return unseen

    def to_json(self) -> str:
        fields = {"at": self.at.to_fields()}
        if self.until is not None:
            fields["until"] = self.until.to_fields()
        return json.dumps({"MongoDb": fields}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MongoMark:
        """What :meth:`to_json` keeps beneath the kind. :raises InvalidOffset: it is not that."""
        at, until = fields.get("at"), fields.get("until")
        if not isinstance(at, dict) or not isinstance(until, dict | None):
            raise InvalidOffset("A mark of MongoDB has no place.", next_step="Give the text that to_json() wrote.")
        return cls(MongoOffset.from_fields(at), None if until is None else MongoOffset.from_fields(until))
