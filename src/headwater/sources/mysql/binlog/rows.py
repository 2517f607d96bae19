"""RowsDecoder: row events of one table to Arrow columns.

:func:`make_rows_decoder` gives the compiled one where it was built, else the Python one; both give the same.
``HEADWATER_PURE=1`` in the environment asks for Python.

An insert gives an ``INSERT`` row, a delete a ``DELETE`` row, an update ``UPDATE_DELETE`` and ``UPDATE_INSERT``; each
row takes a number. With ``binlog_row_image`` other than ``FULL``, images lack columns: a column that an after image
lacks and its before image has is unchanged, and is taken from there; what is then still not known is null, and marked
in :attr:`DecodedColumn.missing`.

Use: one decoder per definition of a captured table::

    plan = TablePlan(full_name, tuple(ColumnPlan(told, column.type, …) for told in table_map.columns))
    decoder = make_rows_decoder(plan)
    seq = decoder.add(event, transaction, seq)     # per row event
    rows = decoder.take()                          # per batch: columns of the types asked for
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.mysql.binlog.events import RowsEvent
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
    special_values: SpecialValues = SpecialValues.ERROR
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


class RowsDecoder(Protocol):
    """Decodes row events of one table, and keeps the rows until they are taken."""

    @property
    def held_rows(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """Of the events whose rows are held."""
        ...

    def add(self, event: RowsEvent, transaction: int, seq: int) -> int:
        """Decode the rows of *event*; the first has number *seq* in *transaction*. The number after the last.

        :raises SourceProtocolError: the event is malformed; none of its rows is held then.
        """
        ...

    def take(self) -> DecodedRows:
        """All rows that are held, and none is held any more.

        :raises SpecialValue: the policy of a column is ``error`` and there is a value that its type does not have.
        :raises UndecodableValue: a value is none of its type.
        """
        ...
