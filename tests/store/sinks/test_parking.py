"""Tables that a sink does not take: nothing of them is committed in part, nothing is told of them that is not so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.query_state import coordinating, unparked

from headwater.failpoints import FailpointError, arm
from headwater.sinks.delivery import TableFailure, read_parked
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import RowsRefused, SinkRefuses, SinkRowError, SinkSchemaError
from headwater.sinks.sink import Committed, Staged, Token
from headwater.sources.table import SourceTable
from headwater.state import open_writer

from .file_sinks import INSERT, ORDERS, Feed, order, table_of

QUERY = "q"
LINES = table_of({column.name: column.type for column in ORDERS.columns}, name="lines")
NOTES = table_of({column.name: column.type for column in ORDERS.columns}, name="notes")
NAMES = (ORDERS.full_name, LINES.full_name)


@dataclass(frozen=True)
class PickySink(DeltaSink):
    """A Delta sink that does not take the tables named in a file, or a row of them."""

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        refused = Path(self.path, "refused")
        if refused.exists() and table.name in refused.read_text():
            if "row" in refused.read_text():
                raise SinkRowError(table.full_name, "a constraint")
            raise SinkSchemaError(table.full_name, "a column is of another type", next_step="Change it.")
        return super().commit(table, token, staged)

    def refuse(self, text: str) -> None:
        Path(self.path).mkdir(exist_ok=True)
        Path(self.path, "refused").write_text(text)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    location = str(tmp_path / "store")
    with open_writer(location):
        yield location


@pytest.fixture
def sink(tmp_path: Path) -> PickySink:
    return PickySink(str(tmp_path / "lake"))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def staged(sink: DeltaSink, table: SourceTable, epoch: int, *keys: int, generation: int = 1) -> Staged:
    token = Token(QUERY, "b1", epoch - 1, epoch, 0, generation=generation)
    return Feed(sink, table).stage_changes(token, [(INSERT, order(key)) for key in keys])


def history(sink: DeltaSink, table: SourceTable, plan: int, *keys: int) -> Staged:
    return Feed(sink, table).stage_history(Token(QUERY, "b1", 0, 1, plan, generation=9), [order(key) for key in keys])


def keys(sink: DeltaSink, table: SourceTable) -> list[int]:
    return sorted(row["id"] for part in sink.shown(table, ["id"]) for row in part.to_pylist())


def test_what_other_tasks_staged_of_a_table_that_failed_is_never_committed(store: str, sink: PickySink) -> None:
    parts = [staged(sink, ORDERS, 1, 1), staged(sink, LINES, 1, 1)]
    failure = TableFailure(LINES, "another task could not stage the rest of it")
    with coordinating(store, QUERY) as coordinator:
        arm("delivery.after_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, parts, [failure], tables=NAMES)
        arm("")
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS, LINES])
    assert keys(sink, ORDERS) == [1]
    assert sink.committed(LINES, QUERY, "b1") == Committed()


def test_a_table_that_was_parked_at_its_commit_comes_back(store: str, sink: PickySink) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, [staged(sink, ORDERS, 1, 1), staged(sink, LINES, 1, 1)], tables=NAMES)
        sink.refuse("lines")
        coordinator.deliver(sink, [staged(sink, ORDERS, 2, 2), staged(sink, LINES, 2, 2)], tables=NAMES)
    assert list(read_parked(store, QUERY)) == [LINES.full_name]
    sink.refuse("")
    unparked(store, QUERY, [LINES.full_name])
    assert read_parked(store, QUERY) == {}
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS, LINES])  # the sink has what was committed to it, and says so


def test_a_table_that_the_sink_lost_begins_anew_also_over_a_restart(
    store: str, sink: PickySink, tmp_path: Path
) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, [staged(sink, ORDERS, 5, 1)])
    shutil.rmtree(tmp_path / "lake" / "public.orders")
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        coordinator.deliver(sink, [history(sink, ORDERS, 3, 1)])
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])


def test_a_row_that_is_refused_although_each_was_tried_parks_its_table(store: str, sink: PickySink) -> None:
    sink.refuse("row of lines")
    parts = [staged(sink, ORDERS, 1, 1), staged(sink, LINES, 1, 1)]
    with coordinating(store, QUERY) as coordinator:
        with pytest.raises(RowsRefused):
            coordinator.deliver(sink, parts, parks_rows=True, tables=NAMES)
        assert coordinator.suspects() == {LINES.full_name}
        coordinator.deliver(sink, parts, parks_rows=True, tables=NAMES)
    assert list(read_parked(store, QUERY)) == [LINES.full_name]
    assert keys(sink, ORDERS) == [1]


def test_tables_that_the_query_no_longer_has_do_not_count_as_parked(store: str, sink: PickySink) -> None:
    with coordinating(store, QUERY) as coordinator:
        failure = TableFailure(NOTES, "it cannot be staged")
        coordinator.deliver(sink, [staged(sink, ORDERS, 1, 1)], [failure], tables=(*NAMES, NOTES.full_name))
        sink.refuse("lines")
        coordinator.deliver(sink, [staged(sink, ORDERS, 2, 2), staged(sink, LINES, 2, 2)], tables=NAMES)
        assert sorted(read_parked(store, QUERY)) == [LINES.full_name, NOTES.full_name]
        sink.refuse("lines orders")
        with pytest.raises(SinkRefuses):
            coordinator.deliver(sink, [staged(sink, ORDERS, 3, 3)], tables=NAMES)


def test_a_truncation_that_the_sink_had_already_is_no_promise(store: str, sink: PickySink) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, [staged(sink, ORDERS, 5, 1)])
    with coordinating(store, QUERY) as coordinator:
        coordinator.forget()
    token = Token(QUERY, "b1", 2, 8, 0, generation=2)
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, [sink.stage_changes(ORDERS, token, iter(()), (4, 0))])
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    assert keys(sink, ORDERS) == [1]
