"""The vocabulary: key hashing and chunks.

The first figure is the promise: keys of an int64 column to vnodes, at 20 M keys/s or more. The others are set against
a bound of the same run: a copy of the same column through memory (the least that any pass over it costs) for the
hashes, and Arrow's own kernels for chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _harness import Figure, interleaved, main, progress
from headwater.stream import Chunk, Op, vnodes_of

PROMISED_KEYS_PER_SECOND = 20e6


def _columns(count: int) -> dict[str, pa.Array]:
    numbers = np.arange(count, dtype=np.int64)
    random = np.random.default_rng(1)
    uuids = [None, pa.py_buffer(random.bytes(16 * count))]
    digits = pa.array(numbers).cast(pa.string())
    lengths = random.integers(1, 41, count)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    letters = pa.py_buffer(random.integers(97, 123, int(ends[-1]), dtype=np.uint8))
    return {
        "int64": pa.array(numbers),
        "int64 with nulls": pa.array(numbers, mask=numbers % 7 == 0),
        "timestamp in ns": pa.array(numbers * 1_000_003).cast(pa.timestamp("ns")),
        "decimal128": pa.array(numbers).cast(pa.decimal128(20, 0)),
        "uuid": pa.ExtensionArray.from_storage(
            pa.uuid(), pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, uuids)
        ),
        "text of 36 bytes": pc.utf8_lpad(digits, 36, "x"),
        "text of 1 to 40 bytes": pa.StringArray.from_buffers(count, pa.py_buffer(ends), letters),
    }


def _copier(column: pa.Array) -> Callable[[], object]:
    """Copy what the column holds: its buffers, byte by byte, to memory that exists already."""
    sources = [np.frombuffer(buffer, dtype=np.uint8) for buffer in column.buffers() if buffer is not None]
    targets = [np.empty_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    return copy


def _hash_figures(count: int, times: int) -> list[Figure]:
    columns = _columns(count)
    rows = pa.record_batch(columns)
    figures = []
    keys = [[name] for name in columns] + [["int64", "uuid"]]
    for key in keys:
        copiers = [_copier(columns[name]) for name in key]

        def copy_all(copiers: list[Callable[[], object]] = copiers) -> None:
            for copy in copiers:
                copy()

        hashing, copying = interleaved(times, lambda key=key: vnodes_of(rows, key), copy_all)  # type: ignore[misc]
        name = " + ".join(key)
        if key == ["int64"]:
            promise = f"hash of {name} vs 20 M keys/s"
            figures.append(Figure(promise, count / hashing, PROMISED_KEYS_PER_SECOND, 1.0, "higher", "keys/s"))
        bound = f"hash of {name} vs copy"
        figures.append(Figure(bound, count / hashing, count / copying, None, "higher", "keys/s"))
    return figures


def _chunk_figures(count: int, times: int) -> list[Figure]:
    ids = np.repeat(np.arange(count // 2, dtype=np.int64), 2)
    rows = pa.record_batch({"id": ids, "note": pa.array(ids).cast(pa.string()), "price": ids * 0.5})
    ops = pa.array(np.tile(np.array([Op.UPDATE_DELETE, Op.UPDATE_INSERT], dtype=np.int8), count // 2))
    cases: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        (
            "build of pairs vs hash",
            lambda: Chunk.build(rows, ops, ["id"]),
            lambda: vnodes_of(rows, ["id"]),
        ),
    ]
    figures = []
    for name, ours, bound in cases:
        seconds, bound_seconds = interleaved(times, ours, bound)
        figures.append(Figure(name, count / seconds, count / bound_seconds, None, "higher", "rows/s"))
    return figures


def measure(quick: bool) -> list[Figure]:
    """All figures."""
    count = 1_000_000 if quick else 8_000_000
    with progress("hashing keys"):
        figures = _hash_figures(count, 5)
    with progress("building chunks"):
        figures += _chunk_figures(count // 8, 5)
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
