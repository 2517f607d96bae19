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

import ipaddress
import uuid
import zlib
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater import compiled
from headwater.sources.errors import SpecialValue, UndecodableValue
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.python_rows import ColumnBuffers, PythonRows
from headwater.sources.mysql.binlog.row_layout import (
    ColumnPlan,
    DecodedColumn,
    DecodedRows,
    Output,
    RowLayout,
    TablePlan,
    charset_name,
    layout_of,
)
from headwater.sources.mysql.binlog.table_map import ColumnType
from headwater.sources.mysql.charsets import decode_text, is_utf8

if TYPE_CHECKING:
    from headwater.sources.mysql.binlog._row_decoder import Decoder
else:
    try:
        from headwater.sources.mysql.binlog._row_decoder import Decoder
    except ImportError:
        Decoder = None


_SIGNED: Final = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}
_UNSIGNED: Final = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}


def column_array(table: TablePlan, plan: ColumnPlan, layout: RowLayout, rows: int, buffers: ColumnBuffers) -> pa.Array:
    """The values of one column, of the type that its plan asks for: exact, or refused.

    ======================================  ===========================================================================
    value                                   becomes
    ======================================  ===========================================================================
    enum, set                               its labels; an enum that is none is ``''``; a set's with commas between
    text in any character set               what the server makes of it for a client that asks for ``utf8mb4``
    binary(n)                               n bytes
    bit(n)                                  (n + 7) / 8 bytes, high byte first, or a boolean or a number
    geometry                                WKB: without the SRID before it
    uuid, inet4, inet6                      their text
    zero, partial or impossible dates,      special values: the column's policy says what becomes of them
    times of no day, a boolean of 2
    ======================================  ===========================================================================

    Text of a number, date or time (the policy ``text``) is as the server prints it.

    :raises SpecialValue: the policy is ``stop`` and there is a value that the type does not have.
    :raises UndecodableValue: a value is none of the type.
    """
    assert plan.type is not None
    data, offsets, validity, nulls, _missing, has_special = buffers
    if has_special:
        _refuse_special(
            table, plan, "dates of no calendar" if layout.output is not Output.DAYTIME else "times of no day"
        )
    parts = [None if validity is None else pa.py_buffer(validity)]
    if offsets is not None:
        parts.append(pa.py_buffer(offsets))
    parts.append(pa.py_buffer(data))
    held = pa.Array.from_buffers(_held_type(plan, layout), rows, parts, nulls)
    try:
        return _typed(table, plan, layout, held)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeError, zlib.error, ValueError) as error:
        if isinstance(error, SpecialValue | UndecodableValue):
            raise
        raise UndecodableValue(table.full_name, plan.name, plan.source_type, "a value is none of its type.") from None


def _refuse_special(table: TablePlan, plan: ColumnPlan, values: str) -> None:
    if not plan.special_values.makes_null:
        raise SpecialValue(table.full_name, plan.name, plan.source_type, values)


def _held_type(plan: ColumnPlan, layout: RowLayout) -> pa.DataType:
    """What the buffers are of."""
    match layout.output:
        case Output.NUMBER:
            if plan.column.type is ColumnType.FLOAT:
                return pa.float32()
            if plan.column.type is ColumnType.DOUBLE:
                return pa.float64()
            return (_SIGNED if layout.signed else _UNSIGNED)[layout.width]
        case Output.YEAR:
            return pa.int16()
        case Output.DECIMAL128:
            return pa.decimal128(layout.size, layout.scale)
        case Output.DECIMAL256:
            return pa.decimal256(layout.size, layout.scale)
        case Output.DAYS:
            return pa.date32()
        case Output.DAYTIME:
            return pa.time64("us")
        case Output.DURATION:
            return pa.duration("us")
        case Output.MOMENT:
            is_utc = plan.column.type in (ColumnType.TIMESTAMP, ColumnType.TIMESTAMP2)
            return pa.timestamp("us", tz="UTC") if is_utc else pa.timestamp("us")
    return pa.binary()


def _typed(table: TablePlan, plan: ColumnPlan, layout: RowLayout, held: pa.Array) -> pa.Array:
    column, kind = plan.column, plan.type
    if column.type is ColumnType.ENUM:
        return _labelled(held, _enum_labels(plan)).cast(kind)
    if column.type is ColumnType.SET:
        return _sets(held, _labels(plan)).cast(kind)
    if column.type in (ColumnType.BLOB_COMPRESSED, ColumnType.VARCHAR_COMPRESSED):
        held = _each(held, _inflated, pa.binary())
    if pa.types.is_boolean(kind):
        return _booleans(table, plan, held)
    if pa.types.is_binary(held.type) and pa.types.is_string(kind):
        return _text(plan, layout, held)
    if layout.output is Output.YEAR and pa.types.is_string(kind):
        return pc.utf8_lpad(held.cast(kind), 4, "0")
    return held if held.type == kind else held.cast(kind)


def _booleans(table: TablePlan, plan: ColumnPlan, held: pa.Array) -> pa.BooleanArray:
    special = pc.fill_null(pc.and_(pc.not_equal(held, 0), pc.not_equal(held, 1)), False)
    if pc.any(special).as_py():
        _refuse_special(table, plan, "numbers that are neither 0 nor 1")
        held = pc.if_else(special, pa.scalar(None, held.type), held)
    return pc.not_equal(held, 0)


def _text(plan: ColumnPlan, layout: RowLayout, held: pa.BinaryArray) -> pa.StringArray:
    column = plan.column
    if layout.output in (Output.JSON, Output.TIME_TEXT, Output.DECIMAL_TEXT, Output.TRANSCODED):
        return held.cast(pa.string())
    address = _ADDRESSES.get(plan.source_type.lower())
    if address is not None:
        return _each(held, address, pa.string())
    if column.type in (ColumnType.BIT, ColumnType.GEOMETRY, ColumnType.VECTOR):
        return _each(held, bytes.hex, pa.string())
    charset = charset_name(plan)
    if is_utf8(charset):
        return held.cast(pa.string())
    if charset == "binary":
        return _each(held, bytes.hex, pa.string())
    return _each(held, lambda data: decode_text(charset, data), pa.string())


def _each(held: pa.BinaryArray, convert: Callable[[bytes], Any], kind: pa.DataType) -> pa.Array:
    """Rare kinds of values: converted one by one, each different one once."""
    encoded = held.dictionary_encode()
    made = pa.array([convert(value) for value in encoded.dictionary.to_pylist()], kind)
    return made.take(encoded.indices)


# -- enums and sets ----------------------------------------------------------------------------------------------------


def _labels(plan: ColumnPlan) -> list[str]:
    assert plan.column.labels is not None
    charset = charset_name(plan)
    if charset == "binary":
        charset = "utf8mb4"
    return [decode_text(charset, label) for label in plan.column.labels]


def _enum_labels(plan: ColumnPlan) -> list[str]:
    return ["", *_labels(plan)]


def _labelled(held: pa.UInt64Array, labels: list[str]) -> pa.StringArray:
    highest = pc.max(held).as_py()
    if highest is not None and highest >= len(labels):
        raise ValueError("an enum has a number that is none")
    return pa.array(labels, pa.string()).take(held)


def _sets(held: pa.UInt64Array, labels: list[str]) -> pa.StringArray:
    encoded = held.dictionary_encode()
    made = []
    for number in encoded.dictionary.to_pylist():
        if number >> len(labels):
            raise ValueError("a set has a bit that is none")
        made.append(",".join(label for place, label in enumerate(labels) if number >> place & 1))
    return pa.array(made, pa.string()).take(encoded.indices)


# -- types of MariaDB --------------------------------------------------------------------------------------------------


def _inflated(data: bytes) -> bytes:
    """A value of a COMPRESSED column: a byte that says how, its length, then zlib without a header or not."""
    if not data or data[0] == 0:
        return data[1:]
    size = data[0] & 7
    length = int.from_bytes(data[1 : 1 + size], "big")
    inflater = zlib.decompressobj(-zlib.MAX_WBITS if data[0] & 8 else zlib.MAX_WBITS)
    content = inflater.decompress(data[1 + size :], length + 1)
    if len(content) != length:
        raise ValueError("a compressed value has another size than it says")
    return content


def _uuid(data: bytes) -> str:
    """MariaDB turns the parts of a UUID of the versions 1 to 5 round, so that those of one time lie together."""
    if len(data) != 16:
        raise ValueError("a UUID of another size")
    is_turned = data[6] & 0x80 and 0 < data[8] < 0x60
    turned = data[12:16] + data[10:12] + data[8:10] + data[6:8] + data[0:6]
    return str(uuid.UUID(bytes=turned if is_turned else data))


def _inet4(data: bytes) -> str:
    return str(ipaddress.IPv4Address(data))


def _inet6(data: bytes) -> str:
    """As the server writes it: the longest run of zeros left out, be it one, and an address of version 4 in its way."""
    if len(data) != 16:
        raise ValueError("an address of another size")
    parts = [f"{data[at] << 8 | data[at + 1]:x}" for at in range(0, 16, 2)]
    runs = [(len(list(run)), zero) for zero, run in groupby(parts, lambda part: part == "0")]
    longest = max((size for size, zero in runs if zero), default=0)
    place, start = 0, -1
    for size, zero in runs:
        if zero and size == longest:
            start = place
            break
        place += size
    holds_v4 = start == 0 and (longest == 6 or (longest == 5 and parts[5] == "ffff"))
    if holds_v4:
        parts[6:] = [_inet4(data[12:])]
    if start < 0:
        return ":".join(parts)
    return f"{':'.join(parts[:start])}::{':'.join(parts[start + longest :])}"


_ADDRESSES: Final[dict[str, Callable[[bytes], str]]] = {"uuid": _uuid, "inet4": _inet4, "inet6": _inet6}


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
