"""The vectorised key hash equals the reference for every type, representation, slice and layout."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.stream import vnode_reference as reference

from headwater.stream import hash as key_hash
from headwater.stream import hash_keys, vnodes_of

QUICK = settings(max_examples=60, deadline=None)


def integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.integers(low, high) | st.sampled_from([low, high, 0, 1, max(low, -1)])


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    limit = 10**precision - 1
    edges = [n for n in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**127 - 1, -(2**127) - 1) if abs(n) <= limit]
    wanted = st.integers(-limit, limit) | st.integers(-9, 9) | st.sampled_from([0, *edges])
    return wanted.map(lambda n: Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)))


TICKS = integers(64, signed=True)
TEXT = st.text(max_size=40) | st.text(alphabet="ab\0é", max_size=9)
BYTES = st.binary(max_size=40)

VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    *((pa.type_for_alias(f"int{bits}"), integers(bits, signed=True)) for bits in (8, 16, 32, 64)),
    *((pa.type_for_alias(f"uint{bits}"), integers(bits, signed=False)) for bits in (8, 16, 32, 64)),
    (pa.bool_(), st.booleans()),
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.dictionary(pa.int32(), pa.string()), TEXT),
    (pa.binary(), BYTES),
    (pa.large_binary(), BYTES),
    (pa.binary_view(), BYTES),
    *((pa.binary(size), st.binary(min_size=size, max_size=size)) for size in (0, 1, 7, 8, 12, 16, 1040)),
    (pa.uuid(), st.uuids().map(lambda value: value.bytes)),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.date64(), st.integers(-(2**36), 2**36).map(lambda days: days * 86_400_000)),
    *((pa.time32(unit), st.integers(0, 86_399)) for unit in ("s", "ms")),
    *((pa.time64(unit), st.integers(0, 86_399_999_999)) for unit in ("us", "ns")),
    *((pa.timestamp(unit), TICKS) for unit in ("s", "ms", "us", "ns")),
    (pa.timestamp("us", "Europe/Vienna"), TICKS),
    *((pa.duration(unit), TICKS) for unit in ("s", "ns")),
    (pa.decimal128(38, 5), decimals(38, 5)),
    (pa.decimal256(76, 0), decimals(76, 0)),
    (pa.decimal32(9, 2), decimals(9, 2)),
    (pa.decimal64(18, 2), decimals(18, 2)),
    (pa.null(), st.none()),
]


def array_of(kind: Any, values: list[Any]) -> Any:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    if pa.types.is_float16(kind):
        return pa.array([None if v is None else np.float16(v) for v in values], kind)
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return pa.array(values, kind)


def hash_of_one(value: Any, kind: Any) -> int:
    return int(hash_keys(pa.record_batch({"k": pa.array([value], kind)}), ["k"])[0])


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=lambda part: str(part) if isinstance(part, pa.DataType) else "")
def test_each_type_hashes_as_the_reference_also_in_slices(kind: Any, value: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.none() | value, max_size=12), st.integers(0, 3))
    def check(values: list[Any], skipped: int) -> None:
        rows = pa.record_batch({"k": array_of(kind, values)}).slice(skipped)
        assert hash_keys(rows, ["k"]).tolist() == reference.hashes_of(rows, ["k"])

    check()


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """A table of two to four key columns with null values, in chunks of their own each."""
    size = draw(st.integers(0, 14))
    columns = {}
    for place in range(draw(st.integers(2, 4))):
        kind, value = draw(st.sampled_from(VALUES))
        array = array_of(kind, draw(st.lists(st.none() | value, min_size=size, max_size=size)))
        cut = draw(st.integers(0, size))
        parts = [array.slice(0, cut), array.slice(cut)]
        columns[f"k{place}"] = pa.chunked_array(parts, array.type)
    return pa.table(columns)


@QUICK
@given(tables())
def test_composite_keys_in_chunked_columns_hash_as_the_reference(table: Any) -> None:
    names = list(table.column_names)
    hashes = hash_keys(table, names)
    assert hashes.tolist() == reference.hashes_of(table, names)
    assert vnodes_of(table, names, 300).to_pylist() == [reference.vnode_of_hash(int(h), 300) for h in hashes]


@QUICK
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"", b"x" * 1024, b"y" * 1025, b"z" * 9000]), max_size=20))
def test_byte_strings_of_mixed_lengths_at_any_offset_hash_as_the_reference(values: list[bytes]) -> None:
    rows = pa.record_batch({"k": pa.array([b"pad", *values], pa.binary())}).slice(1)
    assert hash_keys(rows, ["k"]).tolist() == [reference.hash_of([value]) for value in values]


@given(st.integers(-(2**31), 2**31 - 1))
def test_an_integer_hashes_alike_in_every_width_and_as_a_decimal(value: int) -> None:
    wide = [pa.int32(), pa.int64(), pa.decimal128(12, 0), pa.decimal128(12, 4), pa.decimal256(12, 0)]
    unscaled = {kind: Decimal(value).scaleb(-kind.scale) if pa.types.is_decimal(kind) else value for kind in wide}
    hashes = {hash_of_one(unscaled[kind], kind) for kind in wide}
    if value >= 0:
        hashes |= {hash_of_one(value, kind) for kind in (pa.uint32(), pa.uint64())}
    assert len(hashes) == 1


@given(TEXT)
def test_a_text_hashes_alike_in_every_representation(text: str) -> None:
    kinds = [pa.string(), pa.large_string(), pa.string_view()]
    arrays = [pa.array([text], kind) for kind in kinds]
    arrays += [arrays[0].dictionary_encode(), pc.run_end_encode(arrays[0])]
    content = text.encode()
    arrays += [pa.array([content], kind) for kind in (pa.binary(), pa.large_binary(), pa.binary(len(content)))]
    hashes = {int(hash_keys(pa.record_batch({"k": array}), ["k"])[0]) for array in arrays}
    assert len(hashes) == 1


@given(st.integers(-(2**33), 2**33))
def test_an_instant_hashes_alike_in_every_unit_and_zone(seconds: int) -> None:
    kinds = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Asia/Kolkata")]
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    assert len({hash_of_one(seconds * per_second[kind.unit], kind) for kind in kinds}) == 1


@QUICK
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), TEXT), min_size=1, max_size=30), st.randoms())
def test_the_order_of_rows_moves_no_row(keys: list[tuple[int, str]], random: Any) -> None:
    order = list(range(len(keys)))
    random.shuffle(order)
    rows = pa.record_batch({"a": [a for a, _ in keys], "b": [b for _, b in keys]})
    vnodes = vnodes_of(rows, ["a", "b"], 1000)
    assert vnodes_of(rows.take(pa.array(order)), ["a", "b"], 1000) == vnodes.take(pa.array(order))
    for row in range(len(keys)):
        assert vnodes_of(rows.slice(row, 1), ["a", "b"], 1000)[0] == vnodes[row]


@given(st.lists(integers(64, signed=True), max_size=50), st.integers(1, 16384))
def test_twice_the_count_splits_each_vnode_in_two(keys: list[int], count: int) -> None:
    rows = pa.record_batch({"k": pa.array(keys, pa.int64())})
    once, twice = (vnodes_of(rows, ["k"], number).to_numpy() for number in (count, 2 * count))
    assert (twice // 2 == once).all()
    by_hash = np.argsort(hash_keys(rows, ["k"]))
    assert (np.diff(once[by_hash].astype(int)) >= 0).all()


def chi_square_is_plausible(vnodes: Any, count: int) -> bool:
    """Within six standard deviations of what a uniform distribution gives, on both sides."""
    seen = np.bincount(vnodes.to_numpy(), minlength=count)
    expected = len(vnodes) / count
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    return abs(chi_square - (count - 1)) < 6 * math.sqrt(2 * (count - 1))


ROWS = 200_000
_COUNTING = np.arange(ROWS, dtype=np.int64)


@pytest.mark.parametrize("count", [7, 256, 1000, 4096])
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(pa.array(_COUNTING), id="sequential"),
        pytest.param(pa.array(_COUNTING - ROWS), id="negative"),
        *(pytest.param(pa.array(_COUNTING * step), id=f"steps of {step}") for step in (2, 10, 256, 4096, 1 << 32)),
        pytest.param(pa.array(_COUNTING.astype(np.float64)), id="floats"),
        pytest.param(pa.array(_COUNTING).cast(pa.string()), id="digits"),
        pytest.param(pc.binary_join_element_wise("user-", pa.array(_COUNTING).cast(pa.string()), "@x", ""), id="text"),
        pytest.param(
            pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), ROWS, [None, pa.py_buffer(np.random.default_rng(7).bytes(16 * ROWS))]
            ),
            id="random uuids",
        ),
        pytest.param(
            pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16),
                ROWS,
                [None, pa.py_buffer(np.stack([np.full(ROWS, 77), _COUNTING.byteswap()], axis=1).tobytes())],
            ),
            id="counting uuids",
        ),
    ],
)
def test_keys_spread_evenly_over_the_vnodes(keys: Any, count: int) -> None:
    assert chi_square_is_plausible(vnodes_of(pa.record_batch({"k": keys}), ["k"], count), count)


def test_keys_of_two_small_columns_spread_evenly() -> None:
    rows = pa.record_batch({"a": pa.array(_COUNTING // 400), "b": pa.array((_COUNTING % 400).astype(np.int16))})
    assert chi_square_is_plausible(vnodes_of(rows, ["a", "b"]), 256)
    assert chi_square_is_plausible(vnodes_of(rows, ["b", "a"]), 256)


def test_every_input_bit_turns_every_output_bit_half_of_the_time() -> None:
    keys = np.arange(20_000, dtype=np.int64)
    base = hash_keys(pa.record_batch({"k": keys}), ["k"])
    for bit in range(64):
        flipped = (keys.view(np.uint64) ^ np.uint64(1 << bit)).view(np.int64)
        turned = base ^ hash_keys(pa.record_batch({"k": flipped}), ["k"])
        shares = np.unpackbits(turned.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
        assert np.abs(shares - 0.5).max() < 0.03


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mix_is_the_reference_and_parts_different_words(first: int, second: int) -> None:
    state = np.array([first, second], dtype=np.uint64)
    key_hash.mix(state, np.empty_like(state))
    assert state.tolist() == [reference.mix(first), reference.mix(second)]
    assert (state[0] == state[1]) == (first == second)
