"""The columns that a derivation goes by, in tables where they are missing, or narrower than in others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.deriving import Deriving
from tests.store.sinks.file_sinks import table_of
from tests.store.versioned.written import WrittenTable

from headwater.derive.derivation import Derivation
from headwater.derive.errors import InvalidDerivation
from headwater.derive.frames import Rows, TableFrame
from headwater.sinks.open import open_sink
from headwater.spark.kept_rows import KeptPlace, KeptRead
from headwater.spark.types import spark_schema

NUMBERS = table_of({"id": pa.int32(), "v": pa.int64()}, name="numbers")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[WrittenTable]:
    made = WrittenTable(tmp_path / "kept", NUMBERS)
    made.history([{"id": key, "v": key} for key in range(10)])
    yield made
    made.close()


def test_keys_that_a_table_cannot_hold_are_of_none_of_its_rows(kept: WrittenTable) -> None:
    read = KeptRead(
        KeptPlace(kept.location, str(kept.root), NUMBERS.full_name),
        kept.newest,
        ("id", "v"),
    )
    keys = pa.table({"0": pa.array([3, 3_000_000_000, None, 3 + (1 << 32), 7], pa.int64())})
    frame = TableFrame(read, spark_schema(NUMBERS), (0, 256), Rows.FOUND, ("id",), keys)
    found = [row["id"] for batch in frame.part(0) for row in batch.to_pylist()]
    assert found == [3, 7]


def test_a_column_to_go_by_that_a_table_does_not_have_is_told_before_anything_is_delivered(
    kept: WrittenTable, tmp_path: Path
) -> None:
    def same(numbers: Any) -> Any:
        return numbers

    derivation = Derivation.of("same", same, [NUMBERS.full_name], ["customer"])
    sink = open_sink("delta", path=str(tmp_path / "lake"))
    with (
        closing(Deriving(kept.location, str(kept.root), derivation, same, sink)) as runner,
        pytest.raises(InvalidDerivation, match=r"goes by 'customer', which public.numbers does not have"),
    ):
        runner.step()
