"""A derived table that is asked to rest while a batch of it is under way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.here import Here

from headwater.control.command import DropSink, PauseSinks
from headwater.pipeline import sink_query
from headwater.pipeline.config import configure
from headwater.pipeline.derived_query import DerivedQuery
from headwater.pipeline.errors import SinkRequestFailed
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.pipeline.sink_query import LoopThread
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import SinkState


class Stuck(Here):
    """Its Java answers to nothing, also not to a cancel, until *ended*."""

    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self.ended = ended

    def cancel(self) -> None:
        self.ended.wait()


class Endless:
    """A delivery that hangs until *ended*."""

    name = "shop-totals"

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def open_planner(self, *_: object) -> None:
        self.ended.wait()
        raise InterruptedError


class Resting(DerivedQuery):
    """Its loop hangs until *ended*."""

    ended = threading.Event()

    def _open(self, stop: threading.Event) -> LoopThread:
        delivery: Any = Endless(self.ended)
        jobs: Any = Stuck(self.ended)
        return LoopThread(lambda: delivery, delivery.name, jobs, stop)


def test_nothing_is_forgotten_while_a_batch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BATCH_SECONDS", "_CANCEL_SECONDS"):
        monkeypatch.setattr(sink_query, name, 0.05)
    settings: dict[str, Any] = {
        "source": {"dsn": "postgresql://x", "tables": ["public.orders"]},
        "sink": [{"kind": "table"}, {"kind": "delta", "path": "lake"}],
        "derive": [{"name": "totals", "function": "m:f", "tables": ["public.orders"], "by": ["id"], "sink": "delta"}],
    }
    config = configure(settings, folder=tmp_path)
    control = SinkControl(config.state)
    query = Resting(config, config.derive[0], SparkHost(config), lambda kind, fields: None, control)
    query.step()
    assert query.state is SinkState.RUNNING
    for command in (DropSink(query.label), PauseSinks(query.label)):
        with pytest.raises(SinkRequestFailed, match="has not ended"):
            query.serve(command)
        assert query.state is SinkState.RUNNING
        assert control.desired_state(query.label) is DesiredState.RUNNING
    query.ended.set()
    monkeypatch.undo()
    assert query.serve(PauseSinks()) == {"state": "paused"}
    assert control.desired_state(query.label) is DesiredState.PAUSED
    after = DerivedQuery(config, config.derive[0], SparkHost(config), lambda kind, fields: None, control)
    assert after.state is SinkState.PAUSED
    control.close()
