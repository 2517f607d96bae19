"""What a derivation is made of, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.derive.derivation import Derivation, ResultColumns
from headwater.derive.errors import InvalidDerivation, ResultChanged
from headwater.sources.table import SourceColumn, SourceTable

ORDERS = SourceTable("public", "orders", (SourceColumn("id", pa.int64(), "bigint", 1),), ("id",))


def columns(**kinds: pa.DataType) -> ResultColumns:
    return ResultColumns(tuple(kinds), tuple(kinds.values()), tuple(map(str, kinds.values())))


def test_by_may_name_other_columns_in_each_table() -> None:
    made = Derivation.of("d", "m:f", ["a", "b"], {"b": ["a_id"], "a": ["id"]})
    assert made.by == (("id",), ("a_id",))
    assert made.key_columns == ("id",)
    assert made.full_name == "derived.d"


@pytest.mark.parametrize(
    ("tables", "by", "words"),
    [
        ([], ["id"], "needs tables"),
        (["a", "a"], ["id"], "each once"),
        (["a"], [], "columns that it goes by"),
        (["a", "b"], {"a": ["id"]}, "no columns of b"),
        (["a"], {"a": ["id"], "c": ["id"]}, "columns of c, which it does not read"),
        (["a", "b"], {"a": ["id"], "b": ["x", "y"]}, "as many in each"),
    ],
)
def test_what_cannot_be_derived_is_refused(
    tables: list[str], by: Sequence[str] | Mapping[str, Sequence[str]], words: str
) -> None:
    with pytest.raises(InvalidDerivation, match=words):
        Derivation.of("d", "m:f", tables, by)


def test_a_column_that_a_table_lacks_is_named_with_those_that_it_has() -> None:
    with pytest.raises(InvalidDerivation, match=r"'customer', which public.orders does not have\. It has id"):
        Derivation.of("d", "m:f", ["public.orders"], ["customer"]).check([ORDERS])


def test_a_function_is_found_beside_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "views_of_this_test.py").write_text("def same(orders):\n    return orders\nconstant = 1\n")
    made = Derivation.of("d", "views_of_this_test:same", ["a"], ["id"])
    assert made.load(tmp_path)(5) == 5
    for text, words in (
        ("views_of_this_test", "Write module:function"),
        ("views_of_this_test:other", "cannot be imported"),
        ("no_such_module:f", "beside pipeline.toml"),
        ("views_of_this_test:constant", "no function"),
    ):
        with pytest.raises(InvalidDerivation, match=words):
            Derivation.of("d", text, ["a"], ["id"]).load(tmp_path)


def test_a_result_without_its_key_or_with_a_name_of_ours_is_refused() -> None:
    made = Derivation.of("d", "m:f", ["a"], ["id"])
    with pytest.raises(InvalidDerivation, match="no column 'id', which is of its key"):
        columns(other=pa.int64()).table(made, None)
    with pytest.raises(InvalidDerivation, match="'_op', a name that is taken"):
        columns(id=pa.int64(), _op=pa.int8()).table(made, None)


def test_a_result_with_other_columns_is_not_delivered_over_the_old_one() -> None:
    made = Derivation.of("d", "m:f", ["a"], ["id"])
    known = columns(id=pa.int64(), v=pa.string()).table(made, None)
    assert columns(id=pa.int64(), v=pa.string()).table(made, known) == known
    with pytest.raises(ResultChanged, match=r"v is int32 now, w is new|w is new, v is int32 now.*sink drop d"):
        columns(id=pa.int64(), v=pa.int32(), w=pa.int32()).table(made, known)
