"""JSON lines to a real web server on loopback: with stable keys, again where it helps, never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headwater.sinks import webhook
from headwater.sinks.errors import SinkInputError, SinkLoginRefused, SinkUnreachable, SinkUnwritable
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Committed
from headwater.sinks.webhook import WebhookSink

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order

ROOT = Path(__file__).parents[3]


class Server:
    """A web server that keeps what it is sent, and answers what it is told to, then 200.

    :ivar answers: status codes, or seconds to wait before it answers.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, list[dict[str, Any]], dict[str, str]]] = []
        self.answers: list[int | float] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                lines = [json.loads(line) for line in body.splitlines()]
                outer.requests.append((self.path, self.headers["Idempotency-Key"], lines, dict(self.headers)))
                answer = outer.answers.pop(0) if outer.answers else 200
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = 200
                try:
                    self.send_response(answer)
                    self.send_header("Content-Length", "6")
                    self.end_headers()
                    self.wfile.write(b"secret")
                except OSError:
                    pass  # nobody waits any more

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?token=hidden"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def keys(self) -> list[str]:
        return [key for _, key, _, _ in self.requests]

    @property
    def ids(self) -> list[int]:
        return [row["id"] for _, _, rows, _ in self.requests for row in rows]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What it would have waited."""
    found: list[float] = []
    monkeypatch.setattr(webhook, "_sleep", found.append)
    return found


def sink_of(server: Server, tmp_path: Path, **options: Any) -> WebhookSink:
    sink = open_sink("webhook", url=server.url, staging=str(tmp_path), **options)
    assert isinstance(sink, WebhookSink)
    return sink


def test_changes_are_lines_with_the_name_of_their_batch(server: Server, tmp_path: Path) -> None:
    sink = sink_of(server, tmp_path, headers={"Authorization": "Bearer x"})
    sink.check()
    feed = Feed(sink)
    assert feed.history(1, [order(7)])
    assert feed.changes(1, (INSERT, order(1)), (DELETE, order(7)))
    assert server.keys == ["q/public.orders/0/b1.1", "q/public.orders/1/0"]
    path, _, rows, headers = server.requests[1]
    assert path == "/hook?token=hidden"
    assert (headers["Content-Type"], headers["Authorization"]) == ("application/x-ndjson", "Bearer x")
    assert [(row["_table"], row["_change_type"], row["id"], row["total"]) for row in rows] == [
        ("public.orders", "insert", 1, "1.00"),
        ("public.orders", "delete", 7, "1.00"),
    ]
    assert sink.committed(ORDERS, "q", "b1") == Committed(1, 1, 0)
    assert not sink.is_exactly_once


def test_a_mirror_sends_its_steps(server: Server, tmp_path: Path) -> None:
    feed = Feed(sink_of(server, tmp_path, mode="mirror"))
    feed.changes(1, (INSERT, order(1)), (UPDATE, order(1, None, "2.00"), "status"), (DELETE, order(2)))
    feed.changes(2, (UPDATE, order(3, None, "5.00"), "status"), truncated=(2, 0))
    steps = [row for _, _, rows, _ in server.requests for row in rows]
    assert steps == [
        {"_table": "public.orders", "_step": "delete", "id": 2},
        {"_table": "public.orders", "_step": "upsert", "id": 1, "status": "new", "total": "2.00"},
        {"_table": "public.orders", "_step": "clear"},
        {"_table": "public.orders", "_step": "upsert", "id": 3, "total": "5.00"},
    ]


def test_a_batch_that_comes_again_is_not_sent(server: Server, tmp_path: Path) -> None:
    feed = Feed(sink_of(server, tmp_path))
    assert feed.changes(1, (INSERT, order(1)))
    assert not feed.changes(1, (INSERT, order(1)))
    assert len(server.requests) == 1


def test_large_batches_are_cut_by_rows_and_numbered(server: Server, tmp_path: Path) -> None:
    feed = Feed(sink_of(server, tmp_path, rows=400))
    token = feed.token(1)
    staged = [feed.stage_changes(token, [(INSERT, order(k)) for k in range(s, s + 500)]) for s in (0, 500)]
    assert feed.sink.commit(ORDERS, token, staged)
    assert server.keys == ["q/public.orders/1/0", "q/public.orders/1/0/1", "q/public.orders/1/0/2"]
    assert [len(rows) for _, _, rows, _ in server.requests] == [400, 400, 200]
    assert server.ids == list(range(1000))


def test_history_that_was_read_anew_has_another_name(server: Server, tmp_path: Path) -> None:
    sink = sink_of(server, tmp_path)
    feed = Feed(sink)
    token = feed.token(0, 1, attempt=2)
    assert sink.commit(ORDERS, token, [feed.stage_history(token, [order(1)])])
    assert server.keys == ["q/public.orders/0/b1.1/attempt-2"]
    assert sink.committed(ORDERS, "q", "b1") == Committed(0, 1, 2)


@pytest.mark.parametrize("answer", [500, 503, 429, 408])
def test_a_server_that_fails_for_a_moment_is_asked_again_with_the_same_key(
    server: Server, tmp_path: Path, delays: list[float], answer: int
) -> None:
    server.answers = [answer, answer]
    assert Feed(sink_of(server, tmp_path)).changes(1, (INSERT, order(1)))
    assert server.keys == ["q/public.orders/1/0"] * 3
    assert len(delays) == 2
    assert all(0 <= delay <= 2 for delay in delays)


def test_a_server_that_does_not_answer_in_time_is_asked_again(
    server: Server, tmp_path: Path, delays: list[float]
) -> None:
    server.answers = [0.6]
    assert Feed(sink_of(server, tmp_path, timeout_seconds=0.2)).changes(1, (INSERT, order(1)))
    assert server.keys == ["q/public.orders/1/0"] * 2


def test_a_server_that_always_fails_is_an_error_that_passes_and_nothing_is_lost(
    server: Server, tmp_path: Path, delays: list[float]
) -> None:
    server.answers = [500] * 3
    feed = Feed(sink_of(server, tmp_path, attempts=3))
    with pytest.raises(SinkUnreachable, match=r"answered 500 Internal Server Error, 3 times") as caught:
        feed.changes(1, (INSERT, order(1)))
    assert "hidden" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert feed.sink.committed(ORDERS, "q", "b1") == Committed()
    assert feed.changes(1, (INSERT, order(1)))
    assert set(server.keys) == {"q/public.orders/1/0"}


@pytest.mark.parametrize(("answer", "told"), [(401, "401 Unauthorized"), (404, "404 Not Found"), (301, "301 Moved")])
def test_a_refusal_names_its_status_and_is_not_repeated(
    server: Server, tmp_path: Path, delays: list[float], answer: int, told: str
) -> None:
    server.answers = [answer]
    with pytest.raises(SinkUnwritable, match=told):
        Feed(sink_of(server, tmp_path)).changes(1, (INSERT, order(1)))
    assert len(server.requests) == 1
    assert not delays


def test_nobody_listens(tmp_path: Path, delays: list[float]) -> None:
    sink = open_sink("webhook", url="http://127.0.0.1:1/", staging=str(tmp_path))
    with pytest.raises(SinkUnreachable, match="ConnectionRefusedError"):
        Feed(sink).changes(1, (INSERT, order(1)))
    assert len(delays) == 5


@pytest.mark.parametrize("url", ["ftp://x/", "x", "https://user:password@host/", "http://"])
def test_addresses_that_cannot_be_are_refused_without_telling_them(url: str, tmp_path: Path) -> None:
    with pytest.raises(SinkInputError) as caught:
        open_sink("webhook", url=url, staging=str(tmp_path))
    assert "password" not in str(caught.value)


def test_a_header_in_a_file_is_read_for_each_request(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "authorization"
    sink = open_sink("webhook", url=server.url, staging=str(tmp_path), headers={"Authorization": f"file:{file}"})
    feed = Feed(sink)
    file.write_text("Bearer first\n")
    feed.changes(1, (INSERT, order(1)))
    server.answers = [401]
    with pytest.raises(SinkLoginRefused, match="401 Unauthorized"):
        feed.changes(2, (INSERT, order(2)))
    file.write_text("Bearer second\n")
    feed.changes(2, (INSERT, order(2)))
    sent = [headers["Authorization"] for _, _, _, headers in server.requests]
    assert sent == ["Bearer first", "Bearer first", "Bearer second"]


def test_it_shows_its_host_alone(tmp_path: Path) -> None:
    sink = open_sink("webhook", url="https://host:8443/services/T0KEN?x=y", staging="s", headers={"A": "T0KEN"})
    assert sink.name == "webhook:https://host"
    assert "T0KEN" not in repr(sink)


_CHILD = """
import sys
from tests.store.sinks.file_sinks import INSERT, Feed, order
from headwater.sinks.open import open_sink
feed = Feed(open_sink("webhook", url=sys.argv[1], staging=sys.argv[2], rows=2))
for epoch in (1, 2):
    feed.changes(epoch, *[(INSERT, order(epoch * 10 + place)) for place in range(3)])
"""


@pytest.mark.parametrize(
    ("step", "sent"),
    [
        ("sink.at_least_once.before_send=kill@2", [0, 1, 0, 1]),
        ("sink.webhook.after_request=kill@3", [0, 1, 0, 0, 1]),
        ("sink.at_least_once.after_send=kill@2", [0, 1, 0, 1, 0, 1]),
        ("sink.at_least_once.after_token=kill@2", [0, 1, 0, 1]),
    ],
)
def test_killed_it_sends_again_what_it_did_not_note_under_the_same_keys(
    server: Server, tmp_path: Path, step: str, sent: list[int]
) -> None:
    command = [sys.executable, "-c", _CHILD, server.url, str(tmp_path)]
    armed = {**os.environ, "PYTHONPATH": str(ROOT), "HEADWATER_FAILPOINTS": step}
    assert subprocess.run(command, env=armed, check=False).returncode == -signal.SIGKILL
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0
    assert [0 if key.count("/") == 3 else 1 for key in server.keys] == sent
    by_key: dict[str, list[int]] = {}
    for _, key, rows, _ in server.requests:
        ids = [row["id"] for row in rows]
        assert by_key.setdefault(key, ids) == ids
    assert sorted(one for ids in by_key.values() for one in ids) == [10, 11, 12, 20, 21, 22]


def test_values_are_exact(server: Server, tmp_path: Path) -> None:
    Feed(sink_of(server, tmp_path)).changes(1, (INSERT, order(2**60 + 1, 'line\n"q" \\ ü', "0.10")))
    row = server.requests[0][2][0]
    assert (row["id"], row["status"], Decimal(row["total"])) == (2**60 + 1, 'line\n"q" \\ ü', Decimal("0.10"))
