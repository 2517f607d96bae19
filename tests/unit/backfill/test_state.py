"""CdcBackfillState: golden files of both formats are read, written back as they were, and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.backfill.make import QUEUED, database, summary
from tests.unit.backfill.harness import Stored, barrier

from headwater.backfill.cdc.errors import BackfillStateCorrupt
from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.state import BackfillTables, CdcBackfillState, ParallelState, SingleState
from headwater.backfill.progress import Phase
from headwater.state import Catalog, WriteBatch
from headwater.stream import Epoch, Resume, Throttle

FOLDER = Path(__file__).parents[2] / "fixtures/backfill"
FORMATS = pytest.mark.parametrize("version", [1, 2])


def golden(version: int) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / f"state_v{version}.json").read_text())
    return value


def restored(value: dict[str, Any]) -> Stored:
    stored = Stored()
    batch = WriteBatch()
    for key, cell in value["cells"]:
        batch.put(bytes.fromhex(key), bytes.fromhex(cell))
    stored.store.seal(Epoch.from_ms(next(stored.epochs)), batch)
    return stored


def finish(executor: BackfillExecutor) -> list[int]:
    """Read what is left; its keys."""
    source, keys = database(), list[int]()
    executor.on_barrier(barrier(Resume()))
    executor.on_barrier(barrier(Throttle(None)))
    for plan in range(3, 20):
        executor.wants(float(plan))
        snapshot = source.export()
        for part in executor.hand_out(plan, snapshot, 6):
            keys += [key for (key,) in snapshot.within(executor.kind, part.range)]
        if executor.phase is Phase.SETTLING:
            break
    executor.settle(source.place(source.seal()))
    return keys


@FORMATS
def test_a_golden_state_is_read_and_goes_on_in_its_format(version: int) -> None:
    value = golden(version)
    stored, options = restored(value), BackfillOptions(version=version, split_rows=6)
    executor = stored.open(database().table, options)
    assert json.loads(json.dumps(summary(executor))) == value["summary"]
    assert executor.state.record.version == version
    assert type(executor.state.parts) is (SingleState if version == 1 else ParallelState)
    assert finish(executor) == list(range(20, 30))
    assert executor.renewal == QUEUED, "what waited in the queue begins"


@FORMATS
def test_a_golden_state_is_written_as_it_was(version: int) -> None:
    value = golden(version)
    stored, options = restored(value), BackfillOptions(version=version, split_rows=6)
    executor = stored.open(database().table, options)
    executor.state.change()
    stored.save(executor)
    with stored.store.snapshot() as view:
        assert [[bytes(key).hex(), bytes(cell).hex()] for key, cell in view.scan()] == value["cells"]


def test_a_golden_state_of_format_1_goes_on_in_format_2() -> None:
    value = golden(1)
    stored = restored(value)
    executor = stored.open(database().table, BackfillOptions(split_rows=6))
    assert (executor.state.record.version, type(executor.state.parts)) == (2, ParallelState)
    assert json.loads(json.dumps(summary(executor))) == value["summary"]
    executor = stored.again(executor)
    assert json.loads(json.dumps(summary(executor))) == value["summary"]
    assert finish(executor) == list(range(20, 30))
    assert executor.renewal == QUEUED


@FORMATS
def test_a_state_that_cannot_be_read_is_refused(version: int) -> None:
    stored = restored(golden(version))
    name = database().table.full_name
    with stored.store.snapshot() as view:
        tables = BackfillTables(Catalog.load(view), WriteBatch())
        batch = WriteBatch()
        if version == 1:
            tables.single.put(batch, 0, (name,), (["no cut"], False, 0, False, []))
        else:
            tables.splits.put(batch, 0, (name, 0), ({"cuts": [], "rows": [], "empty": []},))
    stored.store.seal(Epoch.from_ms(next(stored.epochs)), batch)
    with stored.store.snapshot() as view, pytest.raises(BackfillStateCorrupt):
        CdcBackfillState.load(tables, view, name)
