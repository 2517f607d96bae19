"""A commit proves that the files that it commits are those that were staged: otherwise the batch is staged again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.query_state import coordinating

from headwater.failpoints import FailpointError, arm
from headwater.sinks.console import ConsoleSink
from headwater.sinks.delivery import DeliveryState, read_deliveries
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import StagedLost
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.parquet import ParquetSink
from headwater.sinks.sink import Committed, Mode, Sink, Staged, Token
from headwater.state import open_writer

from .file_sinks import INSERT, ORDERS, Feed, history_part, many_changes, many_rows, order
from .lakes import At

MAKE: dict[str, Callable[[str], Any]] = {
    "delta-mirror": DeltaSink,
    "delta-changes": lambda path: DeltaSink(path, Mode.CHANGES),
    "iceberg-mirror": IcebergSink,
    "parquet-changes": ParquetSink,
    "table-mirror": KeptTables,
}
CHANGED, READ = np.arange(10, 8_010), np.arange(10_000, 20_000)


@pytest.fixture(params=MAKE)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    made: Sink = MAKE[request.param](str(tmp_path / "lake"))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    location = str(tmp_path / "store")
    with open_writer(location):
        yield location
    arm("")


def stage(sink: Sink, generation: int = 1) -> list[Staged]:
    """A batch of changes and history, both in files."""
    token = Token("q", "b1", 1, 2, 1, generation=generation)
    return [
        sink.stage_changes(ORDERS, token, iter([many_changes(CHANGED, INSERT, 2)]), None),
        sink.stage_history(ORDERS, token, history_part(), iter([many_rows(READ)])),
    ]


def staged_files(folder: Path, staged: list[Staged]) -> list[Path]:
    names = {Path(file.path).name for one in staged for file in getattr(one.detail, "files", ())}
    names |= {part.path for one in staged for part in getattr(one.detail, "parts", ())}
    names |= {run.name for one in staged for run in getattr(one.detail, "runs", ())}
    return [path for path in folder.rglob("*") if path.name in names]


def ids(sink: Sink) -> list[int]:
    return sorted(key for part in sink.shown(ORDERS, ["id"]) for key in part.column("id").to_pylist())


EXPECTED = [1, *CHANGED.tolist(), *READ.tolist()]


def damage(path: Path, how: str) -> None:
    match how:
        case "removed":
            path.unlink()
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "longer":
            path.write_bytes(path.read_bytes() + bytes(8))


def test_no_damaged_file_is_committed_and_the_batch_can_be_staged_again(sink: Sink, tmp_path: Path) -> None:
    assert Feed(sink).changes(1, (INSERT, order(1)))
    staged = stage(sink)
    paths = staged_files(tmp_path / "lake", staged)
    assert len(paths) >= 2
    for path in paths:
        before = path.read_bytes()
        for how in ("removed", "cut", "longer"):
            damage(path, how)
            with pytest.raises(StagedLost, match=rf"public\.orders: the file .*{path.name} "):
                sink.commit(ORDERS, staged[0].token, staged)
            path.write_bytes(before)
    assert sink.committed(ORDERS, "q", "b1") == Committed(1)
    assert ids(sink) == [1]
    damage(paths[0], "cut")
    again = stage(sink)
    assert sink.commit(ORDERS, again[0].token, again)
    assert ids(sink) == EXPECTED


@pytest.mark.parametrize("sink", ["delta-changes", "iceberg-mirror", "parquet-changes"], indirect=True)
def test_a_batch_whose_staged_files_are_damaged_before_a_recovery_arrives_once(
    sink: Sink, store: str, tmp_path: Path
) -> None:
    with coordinating(store, "q") as coordinator:
        coordinator.deliver(sink, [Feed(sink).stage_changes(Token("q", "b1", 0, 1, 0), [(INSERT, order(1))])])
        staged = stage(sink)
        arm("delivery.after_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, staged)
    arm("")
    damage(staged_files(tmp_path / "lake", staged)[-1], "cut")
    with coordinating(store, "q") as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        assert [record.state for record in coordinator.records] == [DeliveryState.COMMITTED]
        assert sink.committed(ORDERS, "q", "b1") == Committed(1)
        coordinator.deliver(sink, stage(sink, 2))
    assert [(one.epoch, one.state) for one in read_deliveries(store, "q")] == [(2, DeliveryState.COMMITTED)]
    assert ids(sink) == EXPECTED


@pytest.mark.parametrize("sink", ["delta-mirror", "iceberg-mirror", "parquet-changes"], indirect=True)
def test_a_batch_that_another_process_commits_at_the_same_time_is_not_taken_for_lost(sink: Sink, at: At) -> None:
    assert Feed(sink).history(1, [order(1), *many_rows(READ).to_pylist()])
    again = Token("q", "b2", 1, 2, 1)
    staged = [
        sink.stage_changes(ORDERS, again, iter([many_changes(CHANGED, INSERT, 2)]), None),
        sink.stage_history(ORDERS, again, history_part(), iter([many_rows(READ)])),
    ]
    at("sink.staging.before_proof", lambda: sink.commit(ORDERS, again, staged))
    assert not sink.commit(ORDERS, again, staged)
    assert sink.committed(ORDERS, "q", "b2") == Committed(2, 1)


def test_a_sink_that_only_sends_sends_nothing_of_a_damaged_batch(tmp_path: Path) -> None:
    output = tmp_path / "rows"
    sink = ConsoleSink(staging=str(tmp_path / "staging"), path=str(output), format="json")
    staged = stage(sink)
    (*_, last) = staged_files(tmp_path / "staging", staged)
    damage(last, "cut")
    with pytest.raises(StagedLost):
        sink.commit(ORDERS, staged[0].token, staged)
    assert not output.exists() or not output.read_bytes()
