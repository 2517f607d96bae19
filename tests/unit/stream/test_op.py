"""Ops: codes, names, columns of names."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.stream import CHANGE_TYPES, ChunkError, Op, change_types_of, ops_of


def test_the_codes_are_durable() -> None:
    assert {op.name: op.value for op in Op} == {"INSERT": 1, "DELETE": 2, "UPDATE_INSERT": 3, "UPDATE_DELETE": 4}


def test_each_op_has_its_change_type() -> None:
    assert [op.change_type for op in Op] == ["insert", "delete", "update_postimage", "update_preimage"]
    assert [op.change_type for op in Op] == list(CHANGE_TYPES)
    assert [op.adds for op in Op] == [True, False, True, False]


def test_a_column_of_ops_becomes_a_column_of_change_types_and_back() -> None:
    ops = pa.array([1, 4, 3, 2], pa.int8())
    names = change_types_of(ops)
    assert names.to_pylist() == ["insert", "update_preimage", "update_postimage", "delete"]
    assert ops_of(names) == ops
    assert ops_of(names.cast(pa.large_string())) == ops
    assert len(change_types_of(ops.slice(0, 0))) == 0


def test_an_unknown_change_type_is_refused_by_its_row_without_its_value() -> None:
    for bad in (None, "secret"):
        with pytest.raises(ChunkError, match="Row 1") as caught:
            ops_of(pa.array(["insert", bad], pa.string()))
        assert caught.value.row == 1
        assert "secret" not in str(caught.value)
