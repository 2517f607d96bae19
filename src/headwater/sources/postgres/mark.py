"""PostgresMark: what a snapshot contains, told from the ``_position`` of a change alone. Pure.

A snapshot shows the transactions that had ended when it was taken: those below ``xmax`` that are not among the running
(``xip``). A commit is in the WAL before it is shown, so the order of the WAL alone does not tell; it does where it is
certain: nothing that committed before ``low`` is missing, nothing that committed at ``high`` or later is contained. A
standby shows transactions in the very order of the WAL: its marks have ``low == high``.

The JSON form counts the running transactions from ``xmin``::

    {"Postgres": {"high": 29973608, "low": 29973600, "xip": [0, 3], "xmax": 1050, "xmin": 1046}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidOffset
from headwater.sources.offset import position_rows
from headwater.sources.postgres.offset import POSITION_DTYPE, Lsn, PostgresOffset
from headwater.sources.snapshots import SnapshotMark

_NEXT_STEP: Final = "Give the text that to_json() wrote."


@dataclass(frozen=True, slots=True)
class PostgresMark(SnapshotMark):
    """What one snapshot contains.

    :ivar xmin: all transactions below had ended. :ivar xmax: none from here on had begun to be seen.
    :ivar xip: those between that were running, ascending; all numbers with their epoch, 64 bits.
    """

    kind: ClassVar[str] = "Postgres"

    xmin: int
    xmax: int
    xip: tuple[int, ...]
    low_lsn: Lsn
    high_lsn: Lsn

    @classmethod
    def parse(cls, snapshot: str, low_lsn: int, high_lsn: int) -> PostgresMark:
        """:param snapshot: the text of ``pg_current_snapshot()``: ``xmin:xmax:xip,xip``."""
        xmin, xmax, running = snapshot.split(":")
        xip = tuple(sorted(int(xid) for xid in running.split(",") if xid))
        return cls(int(xmin), int(xmax), xip, Lsn(low_lsn), Lsn(high_lsn))

    @property
    def low(self) -> PostgresOffset:
        return PostgresOffset.at(self.low_lsn)

    @property
    def high(self) -> PostgresOffset:
        return PostgresOffset.at(self.high_lsn)

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        rows = position_rows(positions, POSITION_DTYPE)
        commit_lsn = rows["commit_lsn"].astype(np.uint64)
        between = (commit_lsn >= np.uint64(self.low_lsn)) & (commit_lsn < np.uint64(self.high_lsn))
        contained: NDArray[np.bool_] = commit_lsn < np.uint64(self.low_lsn)
        if between.any():
            contained[between] = self._shows(rows["xid"][between].astype(np.uint32))
        return contained

    def _shows(self, xids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Whether transactions had ended; their numbers lack the epoch, and are less than 2³¹ away from ``xmax``."""
        away = (xids - np.uint32(self.xmax & 0xFFFF_FFFF)).view(np.int32)
        whole = np.int64(self.xmax) + away
        shown: NDArray[np.bool_] = whole < self.xmax
        if self.xip:
            running = np.array(self.xip, np.int64)
            place = np.minimum(np.searchsorted(running, whole), len(running) - 1)
            shown &= running[place] != whole
        return shown

    def to_fields(self) -> dict[str, Any]:
        return {
            "xmin": self.xmin,
            "xmax": self.xmax,
            "xip": [xid - self.xmin for xid in self.xip],
            "low": int(self.low_lsn),
            "high": int(self.high_lsn),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PostgresMark:
        try:
            xmin, xmax, low, high = (int(fields[name]) for name in ("xmin", "xmax", "low", "high"))
            xip = tuple(xmin + int(xid) for xid in fields["xip"])
        except (KeyError, TypeError, ValueError):
            raise InvalidOffset(
                "A mark of Postgres lacks a field or has one of another kind.", next_step=_NEXT_STEP
            ) from None
        return cls(xmin, xmax, xip, Lsn(low), Lsn(high))
