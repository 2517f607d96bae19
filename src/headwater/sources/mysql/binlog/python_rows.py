"""PythonRows: decodes the rows of row events into buffers, in Python; ``_row_decoder.c`` does the same, faster.

It is the fallback where nothing could be compiled, and what the compiled one is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error
from headwater.sources.mysql.binlog.events import RowsKind
from headwater.sources.mysql.binlog.json_text import json_text
from headwater.sources.mysql.binlog.numbers import (
    DAY_US,
    decimal_digits,
    decimal_size,
    decimal_text,
    temporal_parts,
    temporal_size,
    temporal_text,
)
from headwater.sources.mysql.binlog.row_layout import Output, RowLayout, Wire

IS_NULL, IS_VALUE, IS_MISSING, IS_SPECIAL = 0, 1, 2, 4
"""What is known of a value; bit 0 is what Arrow wants."""
_INSERT, _DELETE, _UPDATE_INSERT, _UPDATE_DELETE = 1, 2, 3, 4
_MAX_TEXT: Final = 2**31 - 1

ColumnBuffers = tuple[bytes, bytes | None, bytes | None, int, bytes | None, bool]
"""Data, offsets of text, validity where there are nulls, their number, what is missing, whether some were special."""
Buffers = tuple[int, bytes, bytes, bytes, list[ColumnBuffers | None]]
"""Rows, ops, transactions, numbers, columns."""


class Special(Exception):
    """The value is none of its Arrow type."""


def fixed_size(layout: RowLayout) -> int | None:
    """The size of every value; ``None`` where each has its own before it."""
    if layout.wire in (Wire.FIXED, Wire.BITS):
        return layout.size
    if layout.wire is Wire.DECIMAL:
        return decimal_size(layout.size, layout.scale)
    return None if layout.wire is Wire.COUNTED else temporal_size(layout.wire, layout.size)


class _Column:
    __slots__ = ("convert", "count", "is_skipped", "nothing", "size", "valid", "values", "width")

    def __init__(self, layout: RowLayout) -> None:
        self.size, self.count, self.width = fixed_size(layout), layout.size, layout.width
        self.is_skipped = layout.output is Output.SKIP
        self.convert = _converter(layout)
        self.nothing = bytes(layout.width)
        self.values: list[bytes] = []
        self.valid: list[int] = []

    def put(self, data: bytes) -> None:
        if self.convert is not None:
            try:
                data = self.convert(data)
            except Special:
                self.put_nothing(IS_SPECIAL)
                return
        self.values.append(data)
        self.valid.append(IS_VALUE)

    def put_nothing(self, why: int) -> None:
        self.values.append(self.nothing)
        self.valid.append(why)

    def cut(self, rows: int) -> None:
        del self.values[rows:], self.valid[rows:]

    def take(self) -> ColumnBuffers | None:
        values, valid = self.values, np.array(self.valid, np.uint8)
        self.values, self.valid = [], []
        if self.is_skipped:
            return None
        offsets = None
        if not self.width:
            ends = np.zeros(len(values) + 1, np.int64)
            np.cumsum([len(value) for value in values], out=ends[1:])
            if ends[-1] > _MAX_TEXT:
                raise protocol_error("the rows of a batch hold more than 2 GiB in one column.")
            offsets = ends.astype(np.int32).tobytes()
        nulls = int((valid & 1 == 0).sum())
        validity = np.packbits(valid & 1, bitorder="little").tobytes() if nulls else None
        missing = (valid == IS_MISSING).astype(np.uint8).tobytes() if (valid == IS_MISSING).any() else None
        return b"".join(values), offsets, validity, nulls, missing, bool((valid == IS_SPECIAL).any())


class PythonRows:
    """Rows of one table, until they are taken."""

    def __init__(self, layouts: list[RowLayout]) -> None:
        self._columns = [_Column(layout) for layout in layouts]
        self._ops: list[int] = []
        self._transactions: list[int] = []
        self._seqs: list[int] = []
        self.held_bytes = 0

    @property
    def held_rows(self) -> int:
        return len(self._ops)

    def add(
        self,
        data: bytes,
        start: int,
        end: int,
        kind: int,
        present: bytes,
        present_after: bytes,
        transaction: int,
        seq: int,
        /,
    ) -> int:
        """See :meth:`~headwater.sources.mysql.binlog.rows.RowsDecoder.add`."""
        size = (len(self._columns) + 7) // 8
        if len(present) != size or (kind == RowsKind.UPDATE and len(present_after) != size):
            raise protocol_error("rows have another number of columns than their table.")
        before = self.held_rows
        read = Cursor(data, start, end)
        try:
            seq = self._add(read, kind, _places(present, self._columns), _places(present_after, self._columns), seq)
        except BaseException:
            del self._ops[before:], self._seqs[before:]
            for column in self._columns:
                column.cut(before)
            raise
        self._transactions += [transaction] * (self.held_rows - before)
        self.held_bytes += end - start
        return seq

    def _add(self, read: Cursor, kind: int, present: list[bool], after: list[bool], seq: int) -> int:
        op = {RowsKind.INSERT: _INSERT, RowsKind.DELETE: _DELETE}.get(RowsKind(kind), _UPDATE_DELETE)
        while read.left:
            self._image(read, present, None)
            self._ops.append(op)
            self._seqs.append(seq)
            seq += 1
            if kind == RowsKind.UPDATE:
                self._image(read, after, present)
                self._ops.append(_UPDATE_INSERT)
                self._seqs.append(seq)
                seq += 1
        return seq

    def _image(self, read: Cursor, present: list[bool], before: list[bool] | None) -> None:
        here = sum(present)
        if not here:
            raise protocol_error("a row has no columns.")
        nulls, order = read.take((here + 7) // 8), 0
        data, at, end = read.data, read.place, read.end
        for place, column in enumerate(self._columns):
            if present[place]:
                if nulls[order >> 3] >> (order & 7) & 1:
                    if not column.is_skipped:
                        column.put_nothing(IS_NULL)
                else:
                    size = column.size
                    if size is None:
                        at += column.count
                        if at > end:
                            raise protocol_error("a row is cut off.")
                        size = int.from_bytes(data[at - column.count : at], "little")
                    if at + size > end:
                        raise protocol_error("a row is cut off.")
                    if not column.is_skipped:
                        column.put(data[at : at + size])
                    at += size
                order += 1
            elif column.is_skipped:
                continue
            elif before is not None and before[place]:
                column.values.append(column.values[-1])
                column.valid.append(column.valid[-1])
            else:
                column.put_nothing(IS_MISSING)
        read.place = at

    def take_buffers(self) -> Buffers:
        """All rows, and none is held any more."""
        ops, transactions, seqs = self._ops, self._transactions, self._seqs
        self._ops, self._transactions, self._seqs, self.held_bytes = [], [], [], 0
        return (
            len(ops),
            np.array(ops, np.int8).tobytes(),
            np.array(transactions, np.uint64).tobytes(),
            np.array(seqs, np.uint32).tobytes(),
            [column.take() for column in self._columns],
        )


def _places(bits: bytes, columns: list[_Column]) -> list[bool]:
    return [bool(bits[place >> 3] >> (place & 7) & 1) for place in range(len(columns))] if bits else []


# -- one value ---------------------------------------------------------------------------------------------------------


def _converter(layout: RowLayout) -> Callable[[bytes], bytes] | None:
    """What makes of a value's bytes those of its buffer; ``None`` where they are the same."""
    wire, size, scale, output, width = layout[:5]
    match output:
        case Output.NUMBER if wire is Wire.FIXED and size == width:
            return None
        case Output.NUMBER:
            order = "little" if wire is Wire.FIXED else "big"

            def number(data: bytes) -> bytes:
                value = int.from_bytes(data, order, signed=layout.signed)  # type: ignore[arg-type]
                return (value & (1 << 8 * width) - 1).to_bytes(width, "little")

            return number
        case Output.YEAR:
            return lambda data: (1900 + data[0] if data[0] else 0).to_bytes(2, "little")
        case Output.DECIMAL128 | Output.DECIMAL256:

            def decimal(data: bytes) -> bytes:
                negative, digits = decimal_digits(data, size, scale)
                return (-int(digits) if negative else int(digits)).to_bytes(width, "little", signed=True)

            return decimal
        case Output.DECIMAL_TEXT:
            return lambda data: decimal_text(data, size, scale)
        case Output.DAYS | Output.DAYTIME | Output.DURATION | Output.MOMENT | Output.TIME_TEXT:
            return _temporal(layout)
        case Output.PADDED:
            return lambda data: _padded(data, layout.padded)
        case Output.TRANSCODED:
            assert layout.table is not None
            table = [layout.table[at + 1 : at + 1 + layout.table[at]] for at in range(0, 1024, 4)]
            return lambda data: b"".join([table[byte] for byte in data])
        case Output.JSON:
            return json_text
        case Output.WKB:
            return _wkb
    return None


def _temporal(layout: RowLayout) -> Callable[[bytes], bytes]:
    wire, digits, output = layout.wire, layout.size, layout.output
    shown = digits if wire in (Wire.TIME2, Wire.DATETIME2, Wire.TIMESTAMP2) else 0
    has_date = wire not in (Wire.TIME, Wire.TIME2)

    def temporal(data: bytes) -> bytes:
        parts = temporal_parts(data, wire, digits)
        if output is Output.TIME_TEXT:
            return temporal_text(parts, shown, has_date=has_date, has_time=wire is not Wire.DATE)
        if output is Output.DURATION:
            return (-parts.us_of_day if parts.negative else parts.us_of_day).to_bytes(8, "little", signed=True)
        if output is Output.DAYTIME:
            if parts.negative or parts.us_of_day >= DAY_US:
                raise Special
            return parts.us_of_day.to_bytes(8, "little")
        if parts.is_special:
            raise Special
        if output is Output.DAYS:
            return parts.days.to_bytes(4, "little", signed=True)
        return (parts.days * DAY_US + parts.us_of_day).to_bytes(8, "little", signed=True)

    return temporal


def _padded(data: bytes, size: int) -> bytes:
    if len(data) > size:
        raise protocol_error("a BINARY is longer than its type.")
    return data.ljust(size, b"\0")


def _wkb(data: bytes) -> bytes:
    if len(data) < 4:
        raise protocol_error("a geometry is cut off.")
    return data[4:]
