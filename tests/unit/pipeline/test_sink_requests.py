"""Requests to sinks: each is done while somebody waits for it, or never."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from headwater.pipeline.config import configure
from headwater.pipeline.errors import NoAnswer
from headwater.pipeline.sink_requests import SinkRequest, SinkRequestKind, SinkRequests

DROP = SinkRequest("delta", SinkRequestKind.DROP)


def test_a_request_is_answered_once(tmp_path: Path) -> None:
    requests = SinkRequests(tmp_path)
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(requests.ask(DROP, 10)))
    asking.start()
    while not (waiting := list(requests.unanswered())):
        time.sleep(0.01)
    requests.answer(waiting[0], None, {"tables": ["a"]})
    asking.join(10)
    assert (found, list(requests.unanswered())) == ([{"tables": ["a"]}], [])
    assert not list((tmp_path / "requests").iterdir())


def test_what_nobody_waits_for_is_not_done_later(tmp_path: Path) -> None:
    requests = SinkRequests(tmp_path)
    with pytest.raises(NoAnswer):
        requests.ask(DROP, 0.01)
    assert not list(requests.unanswered())
    left = tmp_path / "requests" / "of-one-who-was-killed.json"
    left.write_text(json.dumps({"sink": "delta", "kind": "drop", "epoch": None, "id": "x", "until": time.time() - 1}))
    assert not list(requests.unanswered())
    assert not left.exists()


def test_settings_do_not_show_what_is_secret() -> None:
    sink = {"kind": "postgres", "dsn": "postgres://u:hidden@host/db"}
    config = configure({"source": {"dsn": "postgres://u:hidden@host/db", "tables": ["a"]}, "sink": [sink]})
    assert "hidden" not in repr(config)
    assert "hidden" not in str(config.sink[0])
