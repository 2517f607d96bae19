"""SqlServerMark: what a snapshot contains: every commit up to one number of the log, and none after it. Pure.

No session can enter the snapshot of another one. So the one that plans names a number that everybody who reads later
has behind him, and those who read take what is there and undo, with the changes of the log, what was committed since
(:mod:`headwater.backfill.cdc.rewind`). The rows are those of that number, whoever reads them and when.

That nothing else lies before the number is what the server said; a commit that it had not shown by then and that lies
before it proves it wrong. A mark therefore knows the last one that was shown, and is an error where a later change has
another one below the number: the rows that were read may not have it.

The JSON form::

    {"SqlServer": {"at": {"commit_lsn": "0x00000027000007580005", "told_lsn": "0x00000027000007400003"}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import CommitsCameLate, InvalidOffset
from headwater.sources.sqlserver.offset import POSITION_DTYPE, SqlServerOffset


@dataclass(frozen=True, slots=True)
class SqlServerMark:
    """What a snapshot at one place, between transactions, contains."""

    at: SqlServerOffset

    @property
    def low(self) -> SqlServerOffset:
        """Everything that committed before it is in the snapshot."""
        return self.at

    @property
    def high(self) -> SqlServerOffset:
        """Nothing that committed after it is in the snapshot."""
        return self.at

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """For each ``_position`` of a change: whether the snapshot has it already.

        :raises CommitsCameLate: one of a commit that the server had not shown when it said that there was none.
        """
        data = positions.buffers()[1]
        if data is None or not len(positions):
            return np.zeros(0, np.bool_)
        rows = np.frombuffer(data, POSITION_DTYPE, len(positions), positions.offset * POSITION_DTYPE.itemsize)
        places = rows["place"].astype(np.uint64)
        contained: NDArray[np.bool_] = places <= np.uint64(self.at.commit_lsn.place)
        if (contained & (places > np.uint64(self.at.told.place))).any():
            raise CommitsCameLate(
                f"The server showed a commit before {self.at.commit_lsn.hex} after a history was read there: its"
                " capture job had been held back from the log.",
                next_step="Run: headwater resnapshot",
            )
        return contained

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes, all logged before the snapshot was taken, that it does not show yet."""
        unseen: NDArray[np.bool_] = ~self.contains(positions)
        return unseen

    def to_json(self) -> str:
        return json.dumps({"SqlServer": {"at": self.at.to_fields()}}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SqlServerMark:
        """What :meth:`to_json` keeps beneath the kind. :raises InvalidOffset: it is not that."""
        at = fields.get("at")
        if not isinstance(at, dict):
            raise InvalidOffset("A mark of SQL Server has no place.", next_step="Give the text that to_json() wrote.")
        return cls(SqlServerOffset.from_fields(at))
