"""Vnodes: the golden vectors, the same everywhere, clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.stream import golden
from tests.unit.stream import vnode_reference as reference

from headwater.errors import InputError
from headwater.stream import (
    KeyColumnError,
    KeyTypeError,
    VnodeCountError,
    hash_keys,
    vnodes_of,
)
from headwater.stream.hash import BLOCK, ByteWords

VECTORS = golden.load()
DOCUMENT = Path(__file__).parents[3] / "docs" / "formats" / "vnode.md"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["key"])[:40])
def test_golden_vectors_never_change(vector: dict[str, Any]) -> None:
    rows = golden.rows_of(vector["key"])
    names = list(rows.schema.names)
    expected = int(vector["hash"], 16)
    assert hash_keys(rows, names).tolist() == [expected]
    assert reference.hashes_of(rows, names) == [expected]
    for count, vnode in vector["vnodes"].items():
        assert vnodes_of(rows, names, int(count)).to_pylist() == [vnode]
        assert reference.vnode_of_hash(expected, int(count)) == vnode


def test_the_vectors_of_the_document_are_golden() -> None:
    hashes = {vector["hash"] for vector in VECTORS}
    lines = [line.split("|") for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `")]
    documented = {cells[2].strip(" `"): int(cells[3]) for cells in lines if cells[3].strip().isdigit()}
    assert len(documented) > 15
    assert documented.keys() <= hashes
    for key_hash, vnode in documented.items():
        assert reference.vnode_of_hash(int(key_hash, 16), 256) == vnode


def test_another_process_with_another_hash_seed_gives_the_same_vnodes() -> None:
    program = (
        "import pyarrow as pa; from headwater.stream import vnodes_of;"
        "rows = pa.record_batch({'a': list(range(500)), 'b': [f'kéy {n}' * (n % 9) for n in range(500)]});"
        "print(vnodes_of(rows, ['a', 'b'], 32768).to_pylist())"
    )
    seed = "4242" if os.environ.get("PYTHONHASHSEED") != "4242" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = pa.record_batch({"a": list(range(500)), "b": [f"kéy {n}" * (n % 9) for n in range(500)]})
    assert other.stdout == f"{vnodes_of(rows, ['a', 'b'], 32768).to_pylist()}\n"


def test_keys_over_several_blocks_with_nulls_hash_as_the_reference() -> None:
    numbers = [None if n % 11 == 0 else n * n for n in range(BLOCK * 2 + 100)]
    rows = pa.record_batch(
        {
            "n": numbers,
            "text": [None if n % 13 == 0 else "x" * (n % 40) for n in range(len(numbers))],
            "wide": pa.array(
                [None if n % 17 == 0 else 2**64 - 1 - n * 2**49 for n in range(len(numbers))], pa.uint64()
            ),
        }
    )
    sample = [0, 1, 11, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, rows.num_rows - 1]
    for key in (["n"], ["text"], ["wide"], ["text", "wide", "n"]):
        hashes = hash_keys(rows, key)
        assert hashes[sample].tolist() == reference.hashes_of(rows.take(pa.array(sample)), key)
        assert vnodes_of(rows, key).to_pylist() == [
            reference.vnode_of_hash(key_hash, 256) for key_hash in hashes.tolist()
        ]


def test_a_long_value_is_hashed_by_pieces() -> None:
    values = [b"", b"a" * 1024, b"b" * 1025, bytes(range(256)) * 4100, b"short"]
    rows = pa.record_batch({"k": pa.array(values, pa.binary())})
    assert hash_keys(rows, ["k"]).tolist() == [reference.hash_of([value]) for value in values]


def test_no_byte_after_the_buffer_is_read() -> None:
    for size in range(20):
        content = np.arange(1, size + 1, dtype=np.uint8)
        padded = content.tobytes() + bytes(16)
        positions = np.arange(size + 1, dtype=np.int64)
        expected = [int.from_bytes(padded[at : at + 8], "little") for at in range(size + 1)]
        assert ByteWords(content).at_edge(positions).tolist() == expected


def test_what_lies_under_a_null_does_not_matter() -> None:
    validity = pa.py_buffer(bytes([0b101]))
    hidden = pa.Array.from_buffers(pa.int64(), 3, [validity, pa.py_buffer(np.array([1, 99, 3]))])
    offsets, data = pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32)), pa.py_buffer(b"1993")
    hidden_text = pa.Array.from_buffers(pa.string(), 3, [validity, offsets, data])
    rows = pa.record_batch({"n": hidden, "t": hidden_text})
    clean = pa.record_batch({"n": [1, None, 3], "t": ["1", None, "3"]})
    assert hash_keys(rows, ["n", "t"]).tolist() == hash_keys(clean, ["n", "t"]).tolist()


def test_every_nan_and_both_zeros_are_one_value() -> None:
    nans = np.array([0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF], dtype=np.uint64)
    assert len(set(hash_keys(pa.record_batch({"k": nans.view(np.float64)}), ["k"]).tolist())) == 1
    assert len(set(hash_keys(pa.record_batch({"k": [0.0, -0.0]}), ["k"]).tolist())) == 1


def test_empty_batches_and_tables_have_no_vnodes() -> None:
    kinds = (pa.int64(), pa.string(), pa.decimal128(9), pa.uuid(), pa.string_view(), pa.binary(16))
    schema = pa.schema({str(kind): kind for kind in kinds})
    table = schema.empty_table()
    assert vnodes_of(table, schema.names).to_pylist() == []
    batch = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)
    assert vnodes_of(batch, schema.names).type == pa.uint16()


def test_the_order_of_key_columns_matters() -> None:
    rows = pa.record_batch({"a": [1, 2], "b": [2, 1]})
    one, other = hash_keys(rows, ["a", "b"]), hash_keys(rows, ["b", "a"])
    assert one.tolist() == other[::-1].tolist()
    assert one[0] != other[0]


def test_one_name_may_stand_alone() -> None:
    rows = pa.record_batch({"key": [1, 2]})
    assert vnodes_of(rows, "key") == vnodes_of(rows, ["key"])


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.struct({"a": pa.int64()}),
        pa.map_(pa.string(), pa.int64()),
        pa.month_day_nano_interval(),
        pa.dictionary(pa.int8(), pa.list_(pa.int64())),
        pa.json_(),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [0, 2])
def test_other_types_are_refused_by_column_and_type(kind: Any, rows: int) -> None:
    batch = pa.record_batch({"id": pa.array(range(rows)), "payload": pa.nulls(rows, kind)})
    for whole in (batch, pa.Table.from_batches([batch])):
        with pytest.raises(KeyTypeError, match=r"'payload'.*valid types are int8 to int64") as caught:
            vnodes_of(whole, ["id", "payload"])
        assert isinstance(caught.value, InputError)
        assert caught.value.column == "payload"
        assert caught.value.next_step


@pytest.mark.parametrize("count", [0, -1, 32769, True, 2.0, "256", None])
def test_a_bad_vnode_count_is_refused(count: Any) -> None:
    with pytest.raises(VnodeCountError, match="1 to 32768"):
        vnodes_of(pa.record_batch({"k": [1]}), ["k"], count)


def test_missing_ambiguous_and_repeated_key_columns_are_refused() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "b"])
    with pytest.raises(KeyColumnError, match="'c'; valid values are 'a', 'b', 'b'"):
        vnodes_of(rows, ["c"])
    with pytest.raises(KeyColumnError, match="2 columns"):
        vnodes_of(rows, ["b"])
    with pytest.raises(KeyColumnError, match="more than once"):
        vnodes_of(rows, ["a", "a"])


def test_a_table_without_a_key_has_one_vnode_only() -> None:
    rows = pa.record_batch({"a": [1, 2, 3]})
    assert vnodes_of(rows, [], 1).to_pylist() == [0, 0, 0]
    with pytest.raises(KeyColumnError, match="no key column"):
        vnodes_of(rows, [])
