"""Written tables: their logs are written by a stream of rows, and there is no database behind them.

A place in such a log is the epoch in which the stream's batch was sealed. The ``_position`` of a row is that epoch (8
bytes), its number in the epoch (4) and 0 (4), big endian: as wide as that of a captured row, and ordered as the rows
were written.

What lies before the log cannot be read: :class:`NoSnapshots` stands where a database would be asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
import pyarrow as pa

from headwater.sources.errors import InvalidOffset, NoDatabase
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, KeyOrder
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable

POSITION_TYPE: Final = pa.binary(16)
POSITION_DTYPE: Final = np.dtype([("epoch", ">u8"), ("row", ">u4"), ("zero", ">u4")])


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOffset(CdcOffset):
    """The end of an epoch that a stream has written."""

    kind: ClassVar[str] = "Written"

    epoch: int

    def rank(self) -> tuple[int, ...]:
        return (self.epoch,)

    def to_fields(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> WrittenOffset:
        epoch = fields.get("epoch")
        if type(epoch) is not int or not 0 <= epoch < 1 << 64:
            raise InvalidOffset("The field 'epoch' of a written position is missing or no number of 64 bits.")
        return cls(epoch)

    def position_after(self, last: bytes | None) -> bytes:
        raise _no_database()


def positions_of(epoch: int, first: int, rows: int) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of *rows* rows of *epoch*, from its row number *first* on."""
    made = np.zeros(rows, POSITION_DTYPE)
    made["epoch"] = epoch
    made["row"] = np.arange(first, first + rows)
    return pa.Array.from_buffers(POSITION_TYPE, rows, [None, pa.py_buffer(made)])


class NoSnapshots:
    """In place of the snapshots of a database, where there is none."""

    def export(self) -> ExportedSnapshot:
        """:raises NoDatabase: always."""
        raise _no_database()

    def order(self, table: SourceTable) -> KeyOrder:
        """:raises NoDatabase: always."""
        raise _no_database()

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """:raises NoDatabase: always."""
        raise _no_database()

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """:raises NoDatabase: always."""
        _refuse()


def _no_database() -> NoDatabase:
    return NoDatabase(
        "The log is written by a stream: there is no database that history could be read from.",
        next_step="Deliver what the log holds, with history=false.",
    )


def _refuse() -> NoReturn:
    raise _no_database()
