"""What is kept of a sink's query is forgotten or set back, and the process is killed before any step of it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.backfill.test_parked_tables import ENTRIES, ORDERS, Parking, change, park
from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import PostgresServer
from tests.store.sinks.file_sinks import INSERT, log_rows

from headwater import failpoints
from headwater.backfill.control import status
from headwater.backfill.log_ranges import described_tables
from headwater.control.command import DropSink, PauseSinks, ResumeSinks
from headwater.pipeline.commands import steer
from headwater.pipeline.config import PipelineConfig, configure
from headwater.pipeline.errors import CannotRewind
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.sinks.delivery import behind_of, read_parked
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Staged, Token
from headwater.sources.table import SourceTable
from headwater.state.query_store import QueryReader

pytestmark = pytest.mark.crash

_PROCESSES = multiprocessing.get_context("forkserver")
STEP = "pipeline.sink_before_step"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as made:
        yield made


@pytest.fixture
def capture(server: PostgresServer, tmp_path: Path) -> Iterator[RunningCapture]:
    with server.database() as database:
        for name in ("orders", "entries"):
            database.execute(
                f"CREATE TABLE {name} (id bigint PRIMARY KEY, note text)",
                f"INSERT INTO {name} SELECT n, 'old' FROM generate_series(1, 100) n",
            )
        with running(database, tmp_path, ORDERS, ENTRIES) as made:
            yield made


def config_of(capture: RunningCapture) -> PipelineConfig:
    settings = {
        "pipeline": {"name": "shop", "store": str(capture.store), "work": str(capture.folder / "work")},
        "source": {"dsn": capture.database.dsn, "tables": [ORDERS, ENTRIES]},
        "sink": [{"kind": "delta", "path": str(capture.folder / "lake")}],
    }
    return configure(settings, folder=capture.folder)


def act(config: PipelineConfig, what: str, armed: str) -> None:
    """In another process."""
    failpoints.arm(armed)
    (section,) = config.sink
    match what:
        case "drop":
            steer(config, DropSink(section.label))
        case "back":
            let_back(config.store, config.state, config.query(section))
        case _:
            rewind_sink(config, section, None if what == "rewind" else int(what))


def killed(config: PipelineConfig, what: str, at: int) -> bool:
    """Whether there is so many a step; the process was killed before it."""
    process = _PROCESSES.Process(target=act, args=(config, what, f"{STEP}=kill@{at}"))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def delivered(capture: RunningCapture) -> Parking:
    query = Parking(capture, ORDERS, ENTRIES, query="shop-delta", state=config_of(capture).state)
    query.finish()
    told = {"waiting"}
    while told != {"done"}:
        query.batch(timeout=0.3)
        found = status(query.options.state_location, "shop-delta")
        told = set() if found is None else {table["phase"] for table in found.value["tables"].values()}
    return query


def _is_forgotten(config: PipelineConfig) -> bool:
    """Whether nothing is known of the query: no tables, no deliveries, no progress in the logs."""
    with QueryReader(config.state, "shop-delta") as reader, reader.snapshot() as view:
        return not list(view.scan())


def staged(sink: DeltaSink, table: SourceTable, token: Token, key: int) -> Staged:
    rows = log_rows(table, [(INSERT, {"id": key, "note": ""})])
    place = rows.schema.get_field_index("_epoch")
    return sink.stage_changes(
        table,
        token,
        iter([rows.set_column(place, rows.schema.field(place), pa.array([token.epoch], pa.uint64()))]),
        None,
    )


def test_a_sink_that_is_dropped_begins_anew_whatever_was_left(capture: RunningCapture) -> None:
    config = config_of(capture)
    (section,) = config.sink
    at = 1
    while True:
        query = delivered(capture)
        query.planner.close()
        if not killed(config, "drop", at):
            break
        steer(config, PauseSinks(section.label))  # it is dropped, and stays so
        assert steer(config, ResumeSinks(section.label))["sinks"] == {section.label: "not running"}
        assert _is_forgotten(config), at
        at += 1
    assert at == 3


def test_a_table_is_let_back_once_and_nothing_of_it_is_missing(capture: RunningCapture) -> None:
    config = config_of(capture)
    query = delivered(capture)
    for at in range(1, 3):
        park(query, 100 + 2 * at)
        query.planner.close()
        assert killed(config, "back", at)
        assert list(read_parked(config.state, query.options.query)) == [ENTRIES]
        assert let_back(config.store, config.state, query.options.query) == [ENTRIES]
        query.start()
        change(capture, 101 + 2 * at)
        query.finish()
        query.assert_equal()
    query.close()


def test_a_sink_that_lacks_something_is_noticed_until_it_is_wholly_set_back(capture: RunningCapture) -> None:
    config = config_of(capture)
    query = delivered(capture)
    assert query.checkpoint is not None
    name, place = query.options.query, query.checkpoint.epoch
    tables = [table for table in described_tables(config.store) if table.full_name == ORDERS]
    sink = DeltaSink(str(capture.folder / "lake"))
    backfill = query.planner.backfill_id
    first = Token(name, backfill, place - 1, place, 0)
    later = Token(name, backfill, place, place + 1, 0, generation=query.planner.generation)
    assert sink.commit(tables[0], first, [staged(sink, tables[0], first, 1)])
    slept = query.coordinator
    gone = DeltaSink(str(capture.folder / "before the backup came"))
    slept.deliver(gone, [staged(gone, tables[0], later, 2)])
    slept.flush()
    query.planner.close()
    at = 1
    while killed(config, "rewind", at):
        assert [has.epoch for _, has in behind_of(config.state, name, backfill, sink, tables)] == [place], at
        at += 1
    assert at == 3
    assert not behind_of(config.state, name, backfill, sink, tables)
    query.start()
    assert query.planner.generation > later.generation
    assert query.planner.initial().epoch == place
    query.close()


def test_what_was_dropped_or_never_begun_cannot_be_set_back(capture: RunningCapture) -> None:
    config = config_of(capture)
    (section,) = config.sink
    with pytest.raises(CannotRewind, match="Nothing was delivered"):
        rewind_sink(config, section, 5)
    delivered(capture).close()
    forget_sink(config, section)
    with pytest.raises(CannotRewind, match="Nothing was delivered"):
        rewind_sink(config, section, 5)
    assert _is_forgotten(config)


def test_a_table_that_is_parked_stays_so_when_its_sink_is_set_back(capture: RunningCapture) -> None:
    config = config_of(capture)
    (section,) = config.sink
    query = delivered(capture)
    assert query.checkpoint is not None
    place = query.checkpoint.epoch
    park(query, 101)
    query.planner.close()
    assert rewind_sink(config, section, place)["tables"] == [ORDERS]
    assert list(read_parked(config.state, query.options.query)) == [ENTRIES]
    query.checkpoint = query.logged = None
    query.start()
    change(capture, 102)
    query.finish()
    assert query.sink.mirror[ORDERS].keys() == {(key,) for key in range(3, 103)}
    query.planner.close()
    assert let_back(config.store, config.state, query.options.query) == [ENTRIES]
    query.start()
    query.finish()
    query.assert_equal(ENTRIES)
    query.close()
