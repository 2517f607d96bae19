"""RunFile: rows of one table in the order of their positions, one for each key, written once and never changed.

An Arrow IPC file whose record batches are blocks of up to :data:`BLOCK_ROWS` rows, then an index of the blocks with
the first and last position, place and checksum of each, then a trailer. A block is read by itself, and checked when it
is read first. docs/formats/versioned.md has the format.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater import failpoints
from headwater.log_store.columns import VNODE
from headwater.sources.table import UNAVAILABLE_COLUMN
from headwater.system.files import make_private, open_private
from headwater.versioned.errors import RunCorrupt
from headwater.versioned.fitting import cast, fitted_names, places
from headwater.versioned.key_positions import positions
from headwater.versioned.net_rows import KIND, ROW, piece_schema

BLOCK_ROWS: Final = 16 * 1024
BLOCK_BYTES: Final = 8 << 20
MAGIC: Final = b"HWRUN\x00\x00\x01"
COMPRESSION: Final = "lz4"

_TRAILER = struct.Struct("<QQI8s")
_INDEX = pa.schema(
    [
        pa.field("first", pa.binary(), False),
        pa.field("last", pa.binary(), False),
        pa.field("rows", pa.uint32(), False),
        pa.field("start", pa.uint64(), False),
        pa.field("size", pa.uint64(), False),
        pa.field("crc", pa.uint32(), False),
    ]
)

BEFORE_RUN = failpoints.register("versioned.before_run")
AFTER_RUN = failpoints.register("versioned.after_run")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a manifest says of a run.

    :ivar name: of its file. :ivar size: in bytes.
    :ivar first: its first position; *last*: its last. :ivar plain: it has whole rows alone.
    """

    name: str
    rows: int
    size: int
    first: bytes
    last: bytes
    plain: bool


class RunWriter:
    """Writes one run. :param schema: the table's own columns. :param plain: of pieces that have whole rows alone."""

    def __init__(self, path: Path, schema: pa.Schema, key_columns: Sequence[str], *, plain: bool) -> None:
        failpoints.hit(BEFORE_RUN)
        self._path, self._keys, self._plain = path, tuple(key_columns), plain
        whole = piece_schema(schema)
        self._schema = pa.schema(
            [field for field in whole if not plain or field.name not in (KIND, UNAVAILABLE_COLUMN)]
        )
        make_private(path.parent)
        self._file = _SummedFile(path)
        options = pa.ipc.IpcWriteOptions(compression=COMPRESSION, use_threads=False)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), self._schema, options=options)
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        self._index: dict[str, list[Any]] = {name: [] for name in _INDEX.names}
        self.rows = 0

    @property
    def size(self) -> int:
        return int(self._file.tell())

    def write(self, rows: pa.RecordBatch) -> None:
        """Take rows that come after those before."""
        if not rows.num_rows:
            return
        kept = rows.select(self._schema.names)
        self._held.append(kept)
        self._held_rows += kept.num_rows
        self._held_bytes += kept.nbytes
        if self._held_rows >= BLOCK_ROWS or self._held_bytes >= BLOCK_BYTES:
            self._flush(everything=False)

    def write_all(self, batches: Iterable[pa.RecordBatch]) -> RunInfo | None:
        """Of all *batches*; ``None``, and no file: they have no rows. What was written is removed if they fail."""
        try:
            for batch in batches:
                self.write(batch)
            return self.close()
        except BaseException:
            self.abort()
            raise

    def close(self) -> RunInfo | None:
        """The run, durable; ``None``: it has no rows, and there is no file."""
        self._flush(everything=True)
        self._writer.close()
        if not self.rows:
            self.abort()
            return None
        end = self._file.tell()
        index = pa.BufferOutputStream()
        with pa.ipc.new_stream(index, _INDEX) as stream:
            stream.write_table(pa.table(self._index, _INDEX))
        data = index.getvalue()
        self._file.write(data)
        self._file.write(_TRAILER.pack(end, data.size, zlib.crc32(data), MAGIC))
        size = self._file.tell()
        self._file.sync()
        self._file.close()
        failpoints.hit(AFTER_RUN)
        return RunInfo(self._path.name, self.rows, size, self._index["first"][0], self._index["last"][-1], self._plain)

    def abort(self) -> None:
        """Remove what was written; nobody was told of it."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self, *, everything: bool) -> None:
        if not self._held:
            return
        whole = pa.concat_batches(self._held) if len(self._held) > 1 else self._held[0]
        rows = max(1, min(BLOCK_ROWS, int(whole.num_rows * BLOCK_BYTES / max(self._held_bytes, 1))))
        start = 0
        while whole.num_rows - start >= rows or (everything and start < whole.num_rows):
            self._block(whole.slice(start, rows))
            start += rows
        left = whole.slice(start)
        self._held = [left] if left.num_rows else []
        self._held_rows, self._held_bytes = left.num_rows, left.nbytes if left.num_rows else 0

    def _block(self, rows: pa.RecordBatch) -> None:
        ends = pa.concat_batches([rows.slice(0, 1), rows.slice(rows.num_rows - 1)])
        first, last = positions(ends, self._keys).to_pylist()
        start = self._file.tell()
        self._file.crc = 0
        self._writer.write_batch(rows)
        told = (first, last, rows.num_rows, start, self._file.tell() - start, self._file.crc)
        for name, value in zip(_INDEX.names, told, strict=True):
            self._index[name].append(value)
        self.rows += rows.num_rows


class _SummedFile:
    """A file that is written, and the checksum of what was written since somebody set it."""

    def __init__(self, path: Path) -> None:
        self._file = open_private(path, "wb", buffering=1 << 20)
        self._at = 0
        self.crc = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        size = memoryview(data).nbytes
        self._at += size
        return size

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class RunReader:
    """One run, opened: its file may be removed meanwhile. It is not changed by being read; one process, any thread.

    :raises FileNotFoundError: it is gone. :raises RunCorrupt: it is not what was written.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.info = info
        self._path = path
        with pa.memory_map(str(path)) as mapped:
            self._data = mapped.read_buffer()
        size = self._data.size
        if size < _TRAILER.size:
            raise self._corrupt()
        self._end, length, crc, magic = _TRAILER.unpack(self._data[size - _TRAILER.size :])
        index = self._data.slice(self._end, length) if self._end + length < size else None
        if magic != MAGIC or index is None or zlib.crc32(index) != crc:
            raise self._corrupt()
        told = pa.ipc.open_stream(index).read_all()
        self.firsts: list[bytes] = told.column("first").to_pylist()
        self.lasts: list[bytes] = told.column("last").to_pylist()
        self.block_rows: list[int] = told.column("rows").to_pylist()
        self.block_bytes: list[int] = told.column("size").to_pylist()
        self._starts: list[int] = told.column("start").to_pylist()
        self._crcs: list[int] = told.column("crc").to_pylist()
        self._checked: set[int] = set()
        self._readers: dict[tuple[int, ...], Any] = {}
        self.schema: pa.Schema = self._reader(()).schema

    def blocks(self, low: bytes, high: bytes) -> range:
        """The blocks that may have rows in ``[low, high)``."""
        return range(bisect_left(self.lasts, low), bisect_left(self.firsts, high))

    def block_of(self, position: bytes) -> int | None:
        """The block that may have *position*."""
        place = bisect_right(self.firsts, position) - 1
        return place if place >= 0 and position <= self.lasts[place] else None

    def read(self, block: int, wanted: pa.Schema) -> pa.RecordBatch:
        """The rows of *block* with the columns *wanted* of the table, and the marks of a piece."""
        self._check(block)
        found = places(self.schema, wanted)
        has_marks = not self.info.plain
        names = (VNODE, *((KIND, UNAVAILABLE_COLUMN) if has_marks else ()))
        marks = [self.schema.get_field_index(name) for name in names]
        needed = tuple(sorted({place for place in found if place is not None} | set(marks)))
        rows = self._reader(needed).get_batch(block)
        at = {place: number for number, place in enumerate(needed)}
        columns = [
            pa.nulls(rows.num_rows, field.type) if place is None else cast(rows.column(at[place]), field.type)
            for place, field in zip(found, wanted, strict=True)
        ]
        columns += [rows.column(at[place]) for place in marks]
        if has_marks:
            columns[-1] = fitted_names(columns[-1], self.schema, wanted)
        else:
            columns += [_zeros(rows.num_rows), pa.nulls(rows.num_rows, pa.string())]
        return pa.RecordBatch.from_arrays(columns, schema=piece_schema(wanted))

    def _reader(self, needed: tuple[int, ...]) -> Any:
        found = self._readers.get(needed)
        if found is None:
            options = pa.ipc.IpcReadOptions(included_fields=list(needed) or None, use_threads=False)
            source = pa.BufferReader(self._data.slice(0, self._end))
            found = self._readers[needed] = pa.ipc.open_file(source, options=options)
        return found

    def _check(self, block: int) -> None:
        if block not in self._checked:
            start, size = self._starts[block], self.block_bytes[block]
            if zlib.crc32(self._data.slice(start, size)) != self._crcs[block]:
                raise self._corrupt()
            self._checked.add(block)

    def _corrupt(self) -> RunCorrupt:
        return RunCorrupt(
            f"The run {self._path} is not what was written.",
            next_step="Restore it, or read the table anew: headwater resnapshot",
        )


def _zeros(rows: int) -> pa.Array:
    return pa.array(np.full(rows, ROW, np.int8))


def is_plain(rows: pa.RecordBatch) -> bool:
    """Whether rows of a piece are whole rows alone."""
    kinds, told = rows.column(KIND), rows.column(UNAVAILABLE_COLUMN)
    return pc.max(kinds).as_py() in (None, ROW) and told.null_count == rows.num_rows
