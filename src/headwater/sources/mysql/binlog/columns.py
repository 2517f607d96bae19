"""Plans of columns: which Arrow type the values of row events take, and the rows that come of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.mysql.binlog.table_map import BinlogColumn
from headwater.sources.table import SpecialValues


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """What becomes of a column.

    :ivar column: its layout, with what is needed of sign, collation and labels filled in.
    :ivar type: the Arrow type; ``None``: skip it, it is not captured.
    :ivar source_type: its type as the server writes it (``int(10) unsigned``); MariaDB's ``uuid``, ``inet4`` and
        ``inet6`` are known by it alone.
    :ivar special_values: what becomes of values that :attr:`type` does not have.
    :ivar name: for errors.
    """

    column: BinlogColumn
    type: pa.DataType | None
    source_type: str
    special_values: SpecialValues = SpecialValues.STOP
    name: str = ""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The columns of a table in the order of its row events. :ivar full_name: for errors."""

    full_name: str
    columns: tuple[ColumnPlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedColumn:
    """The values of one column.

    :ivar values: of the type that the plan asks for.
    :ivar missing: which values the images did not have; ``None`` where none is.
    """

    values: pa.Array
    missing: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """Rows in the order of the stream.

    :ivar ops: int8, :class:`~headwater.stream.Op` codes.
    :ivar transaction: uint64, what :meth:`RowsDecoder.add` was given.
    :ivar seq: uint32, number in the transaction.
    :ivar columns: by place in the table; ``None`` where the plan skips it.
    """

    ops: NDArray[np.int8]
    transaction: NDArray[np.uint64]
    seq: NDArray[np.uint32]
    columns: list[DecodedColumn | None]

    def __len__(self) -> int:
        return len(self.ops)
