"""A sink whose server does not answer: what it is asked waits for its batch, and nothing else of the pipeline does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.conftest import StartPipeline

from headwater.control.command import PauseSinks, PipelineCommand, ResumeSinks, SinkCommand
from headwater.control.request import CLAIMS, Request, ask
from headwater.pipeline.config import load
from headwater.pipeline.sink_control import PIPELINE
from headwater.state.board import open_board
from headwater.state.query_store import QueryReader


class Hook:
    """A web server that answers when *answers* is set, first with what is in *codes*, then 200."""

    def __init__(self) -> None:
        self.answers, self.is_asked = threading.Event(), threading.Event()
        self.codes: list[int] = []
        self.ids: set[int] = set()
        self.answers.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
                hook.is_asked.set()
                hook.answers.wait(120)
                code = hook.codes.pop(0) if hook.codes else 200
                if code == 200:
                    hook.ids |= {json.loads(line)["id"] for line in lines}
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def section(self, name: str) -> str:
        url = f"http://127.0.0.1:{self.server.server_port}/"
        return f'[[sink]]\nname = "{name}"\nkind = "webhook"\nurl = "{url}"\nattempts = 1\ntimeout_seconds = 120\n'

    def hang(self) -> None:
        self.is_asked.clear()
        self.answers.clear()


@contextmanager
def serving(hook: Hook) -> Iterator[Hook]:
    thread = threading.Thread(target=hook.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hook
    finally:
        hook.answers.set()
        hook.server.shutdown()
        thread.join()
        hook.server.server_close()


class Asking(threading.Thread):
    """Asks a pipeline for something, and waits for the answer."""

    def __init__(self, state: str, command: PipelineCommand) -> None:
        super().__init__(daemon=True)
        self._state, self._request = state, Request(command)
        self.effect: dict[str, Any] = {}
        self.start()

    @property
    def is_begun(self) -> bool:
        return open_board(self._state).read(f"{CLAIMS}/{self._request.id}") is not None

    def run(self) -> None:
        self.effect = ask(self._state, self._request, lambda: QueryReader(self._state, PIPELINE), 120, "pipeline")


@pytest.mark.timeout(300)
def test_a_sink_whose_batch_hangs_holds_up_no_other(newest_postgres: Database, start_pipeline: StartPipeline) -> None:
    newest_postgres.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    with serving(Hook()) as slow, serving(Hook()) as other:
        running = start_pipeline(newest_postgres, '["orders"]', slow.section("slow") + other.section("other"))
        config = load(running.folder / "pipeline.toml")

        def sinks() -> dict[str, dict[str, Any]]:
            return {one["name"]: one for one in running.status()["sinks"]}

        def insert(number: int) -> None:
            newest_postgres.execute(f"INSERT INTO orders VALUES ({number}, 'new')")

        def begin(command: SinkCommand) -> Asking:
            """Ask for it, and wait until the pipeline knows."""
            asking = Asking(config.state, command)
            running.wait_for(lambda: asking.is_begun)
            return asking

        def states(asking: Asking) -> dict[str, str]:
            """That are answered."""
            asking.join(60)
            answer: dict[str, str] = asking.effect["sinks"]
            return answer

        insert(1)
        running.wait_for(lambda: slow.ids == other.ids == {1})
        slow.hang()
        insert(2)
        running.wait_for(slow.is_asked.is_set)
        pausing, resuming = begin(PauseSinks("slow")), begin(ResumeSinks("slow"))

        other.codes.append(503)
        insert(3)
        running.wait_for(lambda: 3 in other.ids)
        running.wait_for(lambda: sinks()["other"]["restarts"] == 1)
        assert states(Asking(config.state, PauseSinks("other"))) == {"other": "paused"}
        every = begin(PauseSinks())
        running.wait_for(lambda: sinks()["delta"]["state"] == "paused")
        assert [asking.is_alive() for asking in (pausing, resuming, every)] == [True] * 3
        assert 2 not in slow.ids

        slow.answers.set()
        assert states(pausing) == {"slow": "paused"}
        assert states(resuming) == {"slow": "starting"}
        assert states(every) == dict.fromkeys(("delta", "slow", "other"), "paused")
        assert states(Asking(config.state, ResumeSinks())) == dict.fromkeys(("delta", "slow", "other"), "starting")
        running.wait_for(lambda: slow.ids == other.ids == {1, 2, 3})
        running.wait_for(lambda: len(json.loads(running.ask("runs", "--json"))[0]["commands"]) == 5)

        slow.hang()
        insert(4)
        running.wait_for(slow.is_asked.is_set)
        begin(PauseSinks("slow"))
        ending = threading.Thread(target=running.end)
        ending.start()
        running.wait_for(lambda: running.status()["state"] == "stopping")
        slow.answers.set()
        ending.join(60)
        assert not ending.is_alive()
        assert running.status()["state"] == "stopped"
