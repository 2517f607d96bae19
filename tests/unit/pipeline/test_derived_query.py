"""A derived table that is asked to rest while a batch of it is under way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.pipeline import derived_query
from headwater.pipeline.config import configure
from headwater.pipeline.derived_query import DerivedQuery
from headwater.pipeline.errors import SinkRequestFailed
from headwater.pipeline.sink_requests import SinkRequest, SinkRequestKind, SinkRequests
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import SinkState


def test_nothing_is_forgotten_while_a_batch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_query, "STOP_SECONDS", 0.05)
    settings: dict[str, Any] = {
        "source": {"dsn": "postgresql://x", "tables": ["public.orders"]},
        "sink": [{"kind": "table"}, {"kind": "delta", "path": "lake"}],
        "derive": [{"name": "totals", "function": "m:f", "tables": ["public.orders"], "by": ["id"], "sink": "delta"}],
    }
    config = configure(settings, folder=tmp_path)
    query = DerivedQuery(config, config.derive[0], SparkHost(config), lambda kind, fields: None)
    ended = threading.Event()
    query._thread = threading.Thread(target=ended.wait, daemon=True)
    query._thread.start()
    query.state = SinkState.RUNNING
    for kind in (SinkRequestKind.DROP, SinkRequestKind.PAUSE):
        with pytest.raises(SinkRequestFailed, match="has not ended"):
            query.serve(SinkRequest(query.label, kind))
        assert query.state is SinkState.RUNNING
        wish = SinkRequests(config.work).wish(query.label)
        assert (wish.dropped, wish.paused) == (False, False)
    ended.set()
    query._thread.join()
    query.step()
    assert query.state is SinkState.STARTING
    assert query.serve(SinkRequest(query.label, SinkRequestKind.PAUSE)) == {"state": "paused"}
