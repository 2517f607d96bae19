"""The record of a derived table: what every release wrote is read, and what made the table is compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.deriving import Deriving
from tests.fixtures.derive.make import FOLDER, TABLE, record
from tests.store.sinks.file_sinks import UPDATE, table_of
from tests.store.versioned.written import WrittenTable

from headwater.derive.derivation import Derivation
from headwater.derive.errors import FunctionChanged
from headwater.derive.fingerprint import fingerprint
from headwater.derive.state import DerivedRecord, DerivedState, read_record
from headwater.sinks.open import open_sink
from headwater.state import WriteBatch
from headwater.state.query_store import own_state

NUMBERS = table_of({"id": pa.int64(), "v": pa.int64()}, name="numbers")


@pytest.mark.parametrize(
    ("version", "function", "planned"), [(1, "", 0), (2, "cpython-311:00ff", 0), (3, "cpython-311:00ff", 11 << 16)]
)
def test_a_record_of_every_release_is_read(tmp_path: Path, version: int, function: str, planned: int) -> None:
    written = json.loads((FOLDER / f"record_v{version}.json").read_text())
    with closing(DerivedState(str(tmp_path / "store"), "shop-totals")) as state:
        batch = WriteBatch()
        state._table.put(batch, 0, ("record",), (written,))
        state.store.seal(batch)
    found = read_record(str(tmp_path / "store"), "shop-totals")
    assert found == replace(record(), function=function, planned=planned)
    assert found.table("derived", "totals") == TABLE


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[WrittenTable]:
    made = WrittenTable(tmp_path / "kept", NUMBERS)
    made.history([{"id": key, "v": key} for key in range(10)])
    yield made
    made.close()


def same(numbers: Any) -> Any:
    return numbers


def other(numbers: Any) -> Any:
    return numbers.where("v > 1")


def runner_of(kept: WrittenTable, tmp_path: Path, function: Callable[..., Any]) -> Deriving:
    derivation = Derivation.of("same", function, [NUMBERS.full_name], ["id"])
    sink = open_sink("console", staging=str(tmp_path / "staging"))
    return Deriving(kept.location, str(kept.root), derivation, function, sink)


def delivered(kept: WrittenTable, function: str) -> DerivedRecord:
    """A record of a table that is delivered up to now."""
    with closing(DerivedState(own_state(kept.location, "shop-same"), "shop-same")) as state:
        state.put(replace(state.record.begun(NUMBERS, kept.newest, function), delivered=kept.newest))
        return state.record


def test_a_function_that_was_edited_stops_with_the_command_that_makes_the_table_anew(
    kept: WrittenTable, tmp_path: Path
) -> None:
    made_by = fingerprint(same, [NUMBERS.full_name])
    delivered(kept, made_by)
    with closing(runner_of(kept, tmp_path, same)) as runner:
        assert not runner.step(), "nothing has changed"
    for _ in range(2):  # also when it is tried again
        with pytest.raises(FunctionChanged) as told:
            runner_of(kept, tmp_path, other)
        assert "headwater sink drop same && headwater resume --sink same" in str(told.value.next_step)
    found = read_record(own_state(kept.location, "shop-same"), "shop-same")
    assert found is not None
    assert found.delivered == kept.newest, "what was delivered is known"
    with closing(runner_of(kept, tmp_path, same)) as runner:
        assert not runner.step(), "it was put back"


@pytest.mark.parametrize("known", ["", "cpython-299:00ff"], ids=["an earlier release", "another version of python"])
def test_a_fingerprint_that_cannot_be_compared_is_taken_anew(kept: WrittenTable, tmp_path: Path, known: str) -> None:
    delivered(kept, known)
    with closing(runner_of(kept, tmp_path, other)) as runner:
        assert not runner.step()
    found = read_record(own_state(kept.location, "shop-same"), "shop-same")
    assert found is not None
    assert found.function == fingerprint(other, [NUMBERS.full_name])
    kept.write((UPDATE, {"id": 1, "v": 2}))
    with pytest.raises(FunctionChanged):
        runner_of(kept, tmp_path, same)


def test_a_batch_that_was_cut_short_is_planned_again_with_the_same_bounds(kept: WrittenTable, tmp_path: Path) -> None:
    delivered(kept, fingerprint(same, [NUMBERS.full_name]))
    wanted = kept.write((UPDATE, {"id": 1, "v": 2}))
    for _ in range(2):  # the second time after a crash
        with closing(runner_of(kept, tmp_path, same)) as runner:
            assert runner.plan()
        found = read_record(own_state(kept.location, "shop-same"), "shop-same")
        assert found is not None
        assert (found.delivered, found.planned) == (found.start, wanted)
        kept.write((UPDATE, {"id": 2, "v": 3}))
    assert kept.newest > wanted
