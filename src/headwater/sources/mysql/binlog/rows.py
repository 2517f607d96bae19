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

from typing import TYPE_CHECKING

import numpy as np

from headwater import compiled
from headwater.sources.mysql.binlog.columns import ColumnPlan, DecodedColumn, DecodedRows, TablePlan
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.python_rows import PythonRows
from headwater.sources.mysql.binlog.row_layout import layout_of
from headwater.sources.mysql.binlog.values import column_array

if TYPE_CHECKING:
    from headwater.sources.mysql.binlog._row_decoder import Decoder
else:
    try:
        from headwater.sources.mysql.binlog._row_decoder import Decoder
    except ImportError:
        Decoder = None

__all__ = ["ColumnPlan", "DecodedColumn", "DecodedRows", "RowsDecoder", "TablePlan", "is_compiled", "make_rows_decoder"]


def is_compiled() -> bool:
    """Whether the compiled code was built and is not switched off by ``HEADWATER_PURE``."""
    return bool(Decoder) and compiled.is_wanted()


def make_rows_decoder(plan: TablePlan) -> RowsDecoder:
    """The fastest decoder that there is, for the rows of one table.

    :raises SourceMisconfigured: the table map does not tell enough of a column.
    """
    return RowsDecoder(plan, Decoder if is_compiled() else PythonRows)


class RowsDecoder:
    """Decodes row events of one table, and keeps the rows until they are taken. :param make: what decodes."""

    def __init__(self, plan: TablePlan, make: type[Decoder | PythonRows]) -> None:
        self._plan = plan
        self._layouts = [layout_of(column) for column in plan.columns]
        self._rows = make(self._layouts)

    @property
    def held_rows(self) -> int:
        return self._rows.held_rows

    @property
    def held_bytes(self) -> int:
        """Of the events whose rows are held."""
        return self._rows.held_bytes

    def add(self, event: RowsEvent, transaction: int, seq: int) -> int:
        """Decode the rows of *event*; the first has number *seq* in *transaction*. The number after the last.

        :raises SourceProtocolError: the event is malformed; none of its rows is held then.
        """
        return self._rows.add(
            event.data,
            event.start,
            event.end,
            event.kind,
            event.present,
            event.present_after or b"",
            transaction,
            seq,
        )

    def take(self) -> DecodedRows:
        """All rows that are held, and none is held any more.

        :raises SpecialValue: the policy of a column is ``stop`` and there is a value that its type does not have.
        :raises UndecodableValue: a value is none of its type.
        """
        rows, ops, transactions, seqs, buffers = self._rows.take_buffers()
        columns: list[DecodedColumn | None] = []
        for plan, layout, held in zip(self._plan.columns, self._layouts, buffers, strict=True):
            if held is None:
                columns.append(None)
                continue
            missing = None if held[4] is None else np.frombuffer(held[4], np.bool_)
            columns.append(DecodedColumn(column_array(self._plan, plan, layout, rows, held), missing))
        return DecodedRows(
            np.frombuffer(ops, np.int8), np.frombuffer(transactions, np.uint64), np.frombuffer(seqs, np.uint32), columns
        )
