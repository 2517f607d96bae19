"""The difference of two results, against a model of dictionaries."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

from headwater.derive.errors import KeyNotUnique
from headwater.derive.frames import NEW, OLD, SIDE, differences
from headwater.log_store.columns import read_schema
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.op import Op

EPOCH = 7 << 16
TABLE = SourceTable(
    "derived",
    "t",
    (
        SourceColumn("k", pa.int64(), "bigint", 1),
        SourceColumn("v", pa.float64(), "double", 2),
        SourceColumn("tags", pa.list_(pa.string()), "array<string>", 3),
    ),
    ("k",),
)
Result = dict[int | None, tuple[float | None, list[str] | None]]
results = some.dictionaries(
    some.one_of(some.none(), some.integers(0, 9)),
    some.tuples(
        some.one_of(some.none(), some.sampled_from([0.0, 1.5, float("nan")])),
        some.one_of(some.none(), some.lists(some.sampled_from(["a", "b"]), max_size=2)),
    ),
    max_size=8,
)


def stream(old: Result, new: Result, sizes: int) -> list[pa.RecordBatch]:
    rows = [(key, OLD, *values) for key, values in old.items()] + [(key, NEW, *values) for key, values in new.items()]
    return batches(sorted(rows, key=lambda row: (row[0] is not None, row[0] or 0, row[1])), sizes)


def batches(rows: list[tuple[Any, ...]], size: int) -> list[pa.RecordBatch]:
    schema = pa.schema([*TABLE.schema, pa.field(SIDE, pa.int32())])
    columns = [(k, v, tags, side) for k, side, v, tags in rows]
    return [
        pa.RecordBatch.from_pylist(
            [dict(zip(schema.names, row, strict=True)) for row in columns[at : at + size]], schema
        )
        for at in range(0, len(columns), size)
    ]


def applied(old: Result, changes: list[pa.RecordBatch]) -> dict[int | None, str]:
    after = {key: repr(values) for key, values in old.items()}
    before: tuple[int | None, str] | None = None
    for row in (row for batch in changes for row in batch.to_pylist()):
        values = repr((row["v"], row["tags"]))
        match Op(row["_op"]):
            case Op.INSERT:
                assert row["k"] not in after
                after[row["k"]] = values
            case Op.DELETE:
                assert after.pop(row["k"]) == values
            case Op.UPDATE_DELETE:
                before = (row["k"], values)
            case Op.UPDATE_INSERT:
                assert before == (row["k"], after[row["k"]])
                assert before[1] != values, "an update changes something"
                after[row["k"]] = values
    return after


@given(old=results, new=results, size=some.integers(1, 5))
def test_the_changes_make_the_old_result_the_new_one(old: Result, new: Result, size: int) -> None:
    changes = list(differences(TABLE, stream(old, new, size), EPOCH))
    assert applied(old, changes) == {key: repr(values) for key, values in new.items()}
    assert all(batch.schema.equals(read_schema(TABLE.log_schema(pa.binary(16)))) for batch in changes)
    seqs = [seq for batch in changes for seq in batch.column("_seq").to_pylist()]
    assert seqs == list(range(len(seqs)))


def test_equal_results_make_no_change() -> None:
    same: Result = {1: (float("nan"), ["a"]), 2: (None, None)}
    assert sum(batch.num_rows for batch in differences(TABLE, stream(same, same, 2), EPOCH)) == 0


@pytest.mark.parametrize("sides", [(NEW, NEW), (OLD, OLD), (OLD, NEW, NEW), (OLD, OLD, NEW)])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_key_that_comes_twice_is_refused_and_its_value_not_told(sides: tuple[int, ...], size: int) -> None:
    rows = [(41, side, 1.0, None) for side in sides] + [(43, NEW, 1.0, None)]
    with pytest.raises(KeyNotUnique, match=r"two rows with one value of k\..*group by") as told:
        list(differences(TABLE, batches(rows, size), EPOCH))
    assert "41" not in str(told.value)
