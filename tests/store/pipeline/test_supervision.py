"""The supervisor of a pipeline whose parts fail while it starts, or while it ends. No source answers, no Spark runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.pipeline import supervision
from headwater.pipeline.config import PipelineConfig, configure
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.pipeline.supervised_query import SinkState
from headwater.pipeline.supervision import STATUS, Supervisor
from headwater.state.board import open_board
from headwater.state.errors import StoreUnavailable

pytestmark = pytest.mark.store


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    settings: dict[str, Any] = {
        "source": {"dsn": "postgresql://app@127.0.0.1:1/shop", "tables": ["public.orders"]},
        "sink": [{"kind": "delta", "path": "lake"}, {"kind": "parquet", "path": "changes"}],
    }
    return configure(settings, folder=tmp_path)


def supervisor_of(config: PipelineConfig) -> Supervisor:
    given: Any = object()  # nothing is delivered: the capture never gets as far
    return Supervisor(config, given)


def shown(config: PipelineConfig) -> str:
    record = open_board(config.state).read(STATUS)
    assert record is not None
    state: str = json.loads(record.data or b"")["state"]
    return state


def test_a_store_that_does_not_answer_at_the_start_or_at_the_end_is_waited_for(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, close, asked, prepared = SinkControl.desired_state, SinkControl.close, list[str](), threading.Event()

    def desired_state(control: SinkControl, sink: str) -> DesiredState:
        asked.append(sink)
        if len(asked) == 2:
            raise StoreUnavailable("It is away.")
        if len(asked) == 4:
            prepared.set()
        return known(control, sink)

    def closed(control: SinkControl) -> None:
        close(control)
        raise StoreUnavailable("It is away again.")

    monkeypatch.setattr(SinkControl, "desired_state", desired_state)
    monkeypatch.setattr(SinkControl, "close", closed)
    supervisor = supervisor_of(config)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    assert prepared.wait(60)
    supervisor.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert asked == ["delta", "parquet", "delta", "parquet"]
    assert supervisor.failure is None
    assert set(supervisor.facts()["sinks"]) == {"delta", "parquet"}
    assert shown(config) == "stopped"


def test_sinks_end_side_by_side(config: PipelineConfig) -> None:
    both = threading.Barrier(2, timeout=60)

    class Ending:
        label, state, failure = "sink", SinkState.STOPPED, None

        def __init__(self) -> None:
            self.asked = self.stopped = False

        def ask_to_stop(self) -> None:
            self.asked = True

        def stop(self) -> None:
            both.wait()
            self.stopped = True

    sinks: list[Any] = [Ending(), Ending()]
    supervisor = supervisor_of(config)
    supervisor._sinks = sinks
    supervisor._stop_parts()
    assert all(sink.asked and sink.stopped for sink in sinks)


def test_no_thread_goes_on_when_a_start_fails(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("The disk cannot be read.")

    monkeypatch.setattr(supervision, "RunJournal", broken)
    with pytest.raises(OSError, match="disk"):
        supervisor_of(config).run()
    assert not [thread for thread in threading.enumerate() if thread.name == "headwater-heartbeat"]
    assert shown(config) == "stopped"
    monkeypatch.undo()
    again = supervisor_of(config)  # nobody holds the lock
    again.stop()
    assert again.run() is None
