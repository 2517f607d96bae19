"""A table is parked and the process killed at any step of it: the others have each change once, and it comes back."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from tests.crash.sinks.file_killed import run
from tests.query_state import coordinating, unparked
from tests.store.sinks.file_sinks import INSERT, Feed, table_of

from headwater import failpoints
from headwater.sinks.delivery import TableFailure, read_parked
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.sink import Mode, Staged, Token
from headwater.sources.table import SourceTable
from headwater.state import open_writer

QUERY = "q"
TABLES = tuple(table_of({"id": pa.int64()}, name=name) for name in ("orders", "lines", "notes"))
ORDERS, LINES, NOTES = TABLES
NAMES = tuple(table.full_name for table in TABLES)
STEPS = (
    "delivery.before_pending",
    "delivery.after_pending",
    "delivery.before_parked",
    "delivery.after_parked",
    "delivery.before_committed",
    "delivery.after_committed",
)


class _NoLines(DeltaSink):
    """It refuses the table ``lines`` from epoch 2 on."""

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        if table.name == "lines" and token.epoch > 1:
            raise SinkSchemaError(table.full_name, "a column is of another type", next_step="Change it.")
        return super().commit(table, token, staged)


def _sink(folder: str, kind: type[DeltaSink] = DeltaSink) -> DeltaSink:
    return kind(f"{folder}/lake", mode=Mode.CHANGES)


def deliver(folder: str, generation: int, armed: str) -> None:
    """Three batches; from the second on the sink refuses one table, and a task could not stage half of another."""
    sink = _sink(folder, _NoLines)
    failpoints.arm(armed)
    with coordinating(f"{folder}/store", QUERY) as coordinator:
        parked = read_parked(f"{folder}/store", QUERY)
        coordinator.recover(sink, "b1", [table for table in TABLES if table.full_name not in parked])
        for epoch in (1, 2, 3):
            parked = read_parked(f"{folder}/store", QUERY)
            left = [table for table in TABLES if table.full_name not in parked]
            token = Token(QUERY, "b1", epoch - 1, epoch, 0, generation=generation)
            staged = [Feed(sink, table).stage_changes(token, [(INSERT, {"id": epoch})]) for table in left]
            failures = [TableFailure(NOTES, "too wide")] if epoch > 1 and NOTES in left else []
            coordinator.deliver(sink, staged, failures, tables=NAMES)


@pytest.mark.parametrize("step", STEPS)
def test_parking_is_killed_at_any_step(step: str, tmp_path: Path) -> None:
    with open_writer(str(tmp_path / "store")):
        pass
    number = 1 if step.endswith("parked") else 2
    assert run(deliver, str(tmp_path), 1, f"{step}=kill@{number}") == -signal.SIGKILL
    assert run(deliver, str(tmp_path), 2, "") == 0
    sink = _sink(str(tmp_path))
    found = {
        table.name: sorted(row["id"] for part in sink.shown(table, ["id"]) for row in part.to_pylist())
        for table in TABLES
    }
    assert found == {"orders": [1, 2, 3], "lines": [1], "notes": [1]}
    location = str(tmp_path / "store")
    parked = read_parked(location, QUERY)
    assert sorted(parked) == ["public.lines", "public.notes"]
    unparked(location, QUERY, parked)
    with coordinating(location, QUERY) as coordinator:
        coordinator.recover(sink, "b1", TABLES)
    assert not list(tmp_path.rglob("*.arrow"))
