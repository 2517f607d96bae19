"""Format 1: one row per key. Pure, and without Python per cell: numpy moves the bytes of all rows at once.

    u8   1                format
    u8   op
    u16  schema version
    null bitmap           bit i of byte i/8 for column i: 1 is null
    per column            fixed width: its Arrow bytes (bool: one byte), zeros when null
                          text and binary: u32 length and the bytes; length 0 when null

Little-endian. Flat columns only: lists, structs and maps need format 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.log_store.errors import ForeignSchema, LogCorrupt, UnknownVersion

FORMAT = 1
_HEAD = 4

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


def check_flat(schema: pa.Schema) -> None:
    """:raises ForeignSchema: a column that format 1 cannot hold."""
    for field in schema:
        _width(field)


def _width(field: pa.Field) -> int | None:
    """Bytes of a column in each row; ``None`` when they vary."""
    kind = field.type
    if pt.is_boolean(kind):
        return 1
    if pt.is_string(kind) or pt.is_binary(kind) or pt.is_large_string(kind) or pt.is_large_binary(kind):
        return None
    if pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind):
        return int(kind.bit_width) // 8
    raise ForeignSchema(
        f"Column {field.name!r} has type {kind}, which format 1 cannot hold.", next_step="Use format 2 for this log."
    )


def encode_rows(rows: pa.RecordBatch, ops: Any, schema_version: int) -> list[bytes]:
    """The stored value of each row."""
    count, columns = rows.num_rows, rows.num_columns
    if not count:
        return []
    nulls = np.zeros((count, (columns + 7) // 8), np.uint8)
    parts: list[tuple[Bytes, Places] | Bytes] = []  # (bytes of all rows, lengths) or an (n, width) array
    for index, field in enumerate(rows.schema):
        column = rows.column(index)
        if column.null_count:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            nulls[:, index // 8] |= missing.astype(np.uint8) << np.uint8(index % 8)
        parts.append(_column_bytes(column, field))
    head = np.zeros((count, _HEAD + nulls.shape[1]), np.uint8)
    head[:, 0] = FORMAT
    head[:, 1] = ops.to_numpy().astype(np.uint8)
    head[:, 2], head[:, 3] = schema_version & 0xFF, schema_version >> 8
    head[:, _HEAD:] = nulls
    sizes = np.full(count, head.shape[1], np.int64)
    for part in parts:
        sizes += part[1] + 4 if isinstance(part, tuple) else part.shape[1]
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    place = ends - sizes
    place = _scatter(out, place, head)
    for part in parts:
        if isinstance(part, tuple):
            data, lengths = part
            place = _scatter(out, place, lengths.astype("<u4").view(np.uint8).reshape(count, 4))
            out[_ragged(place, lengths)] = data
            place = place + lengths
        else:
            place = _scatter(out, place, part)
    whole = out.tobytes()
    starts = (ends - sizes).tolist()
    return [whole[low:high] for low, high in zip(starts, ends.tolist(), strict=True)]


def decode_rows(values: Sequence[bytes], schema: pa.Schema) -> tuple[pa.RecordBatch, pa.Int8Array]:
    """Rows and ops of stored values, all of one schema version.

    :raises UnknownVersion: another format. :raises LogCorrupt: cut short or damaged.
    """
    count = len(values)
    data = np.frombuffer(b"".join(values), np.uint8)
    sizes = np.fromiter(map(len, values), np.int64, count)
    place = np.cumsum(sizes) - sizes
    ends = place + sizes
    head = _HEAD + (len(schema) + 7) // 8
    try:
        if count and sizes.min() < head:
            raise ValueError("head")
        formats = data[place] if count else data
        if (formats != FORMAT).any():
            raise UnknownVersion(
                f"A stored row has format {int(formats[formats != FORMAT][0])}; expected format {FORMAT}."
            )
        ops = pa.array(data[place + 1].astype(np.int8))
        nulls = data[place[:, None] + np.arange(_HEAD, head)] if count else np.zeros((0, head - _HEAD), np.uint8)
        place = place + head
        columns = []
        for index, field in enumerate(schema):
            missing = (nulls[:, index // 8] >> np.uint8(index % 8) & 1).astype(bool)
            column, place = _column(data, place, ends, field, missing)
            columns.append(column)
        if (place != ends).any():
            raise ValueError("length")
    except (ValueError, IndexError, pa.ArrowException) as error:
        if isinstance(error, UnknownVersion):
            raise
        raise LogCorrupt("A stored row is cut short or damaged.") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema), ops


def schema_versions_of(values: Sequence[bytes]) -> NDArray[np.uint16]:
    """The schema version of each value. :raises LogCorrupt: cut short."""
    versions = b"".join(value[2:_HEAD] for value in values)
    if len(versions) != 2 * len(values):
        raise LogCorrupt("A stored row is cut short.")
    return np.frombuffer(versions, "<u2")


def _scatter(out: Bytes, place: Places, part: Bytes) -> Places:
    width: int = part.shape[1]
    out[place[:, None] + np.arange(width)] = part
    moved: Places = place + width
    return moved


def _ragged(starts: Places, lengths: Places) -> Places:
    """The positions of bytes that begin at *starts* and have *lengths*, one after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    positions: Places = np.repeat(starts - before, lengths) + np.arange(total)
    return positions


def _column_bytes(column: Any, field: pa.Field) -> tuple[Bytes, Places] | Bytes:
    width = _width(field)
    count = len(column)
    if width is None:
        column = column.cast(pa.large_binary())
        offsets: Places = np.frombuffer(column.buffers()[1], np.int64, count + 1, column.offset * 8)
        lengths: Places = offsets[1:] - offsets[:-1]
        data = column.buffers()[2]
        raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        if column.null_count:
            lengths = np.where(column.is_null().to_numpy(zero_copy_only=False), 0, lengths)
            return raw[_ragged(offsets[:-1], lengths)], lengths
        return raw[offsets[0] : offsets[-1]], lengths
    if pt.is_boolean(field.type):
        filled: Bytes = column.cast(pa.uint8()).fill_null(0).to_numpy().reshape(count, 1)
        return filled
    raw = np.frombuffer(column.buffers()[1], np.uint8)
    fixed: Bytes = raw[column.offset * width : (column.offset + count) * width].reshape(count, width)
    if column.null_count:
        fixed = np.where(column.is_null().to_numpy(zero_copy_only=False)[:, None], 0, fixed).astype(np.uint8)
    return fixed


def _column(
    data: Bytes, place: Places, ends: Places, field: pa.Field, missing: NDArray[np.bool_]
) -> tuple[Any, Places]:
    count = len(place)
    width = _width(field)
    valid = None
    if missing.any():
        valid = pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())
    if width is None:
        if (place + 4 > ends).any():
            raise ValueError("length")
        lengths = data[place[:, None] + np.arange(4)].copy().view("<u4").reshape(count).astype(np.int64)
        place = place + 4
        if (place + lengths > ends).any():
            raise ValueError("length")
        raw = data[_ragged(place, lengths)]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        buffers = [valid, pa.py_buffer(offsets.tobytes()), pa.py_buffer(raw.tobytes())]
        large = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
        return large.cast(field.type), place + lengths
    if (place + width > ends).any():
        raise ValueError("length")
    raw = data[place[:, None] + np.arange(width)]
    if pt.is_boolean(field.type):
        return pa.array(raw.reshape(count).astype(bool), mask=missing), place + width
    buffers = [valid, pa.py_buffer(raw.tobytes())]
    return pa.Array.from_buffers(field.type, count, buffers), place + width
