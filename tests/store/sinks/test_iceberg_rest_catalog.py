"""Iceberg tables in a REST catalog: pyiceberg's client over HTTP, against a small server of this test's own.

The server here answers from a SQLite catalog of pyiceberg. It shows that
our options reach the client, where tables are put, and that of two commits one is refused; not how others behave.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest
from tests.servers.losing_proxy import losing_proxy

from headwater import failpoints
from headwater.sinks.errors import SinkLoginRefused, SinkUnreachable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Committed, Mode
from headwater.spark.failure import Failure, Remedy

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order
from .iceberg_tables import open_table, statuses

TOKEN = "a-bearer-token"
STATUS: dict[type[Exception], int] = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    catalog: SqlCatalog
    token = TOKEN

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        try:
            if self.headers.get("Authorization") != f"Bearer {self.token}":
                self._send(401, {"error": {"message": "who?", "type": "NotAuthorizedException", "code": 401}})
                return
            self._send(200, self._answer(self.path.partition("?")[0].strip("/").split("/")[1:], body))
        except tuple(STATUS) as error:
            code = STATUS[type(error)]
            self._send(code, {"error": {"message": "refused", "type": type(error).__name__, "code": code}})

    def _answer(self, parts: list[str], body: dict[str, Any]) -> Any:
        names = [part.replace("%1F", ".") for part in parts]
        if names == ["config"]:
            return {"defaults": {}, "overrides": {}}
        if names == ["namespaces"]:
            if self.command == "POST":
                self.catalog.create_namespace(tuple(body["namespace"]))
                return body
            return {"namespaces": self.catalog.list_namespaces()}
        if len(names) == 2:
            return {"namespace": names[1:], "properties": self.catalog.load_namespace_properties(names[1])}
        if len(names) == 3:
            schema = Schema.model_validate(body["schema"])
            spec = PartitionSpec.model_validate(body["partition-spec"])
            assert body.get("location") is None
            table = self.catalog.create_table(
                (names[1], body["name"]), schema, None, spec, properties=body["properties"]
            )
            return self._shown(table)
        table = self.catalog.load_table((names[1], names[3]))
        if self.command == "POST":
            request = CommitTableRequest.model_validate(
                {"identifier": {"namespace": [names[1]], "name": names[3]}, **body}
            )
            self.catalog.commit_table(table, request.requirements, request.updates)
            table = self.catalog.load_table((names[1], names[3]))
        return self._shown(table)

    def _shown(self, table: Any) -> Any:
        metadata = json.loads(table.metadata.model_dump_json())
        return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}

    def _send(self, code: int, answer: Any) -> None:
        data = b"" if self.command == "HEAD" else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with SqlCatalog("there", uri=f"sqlite:///{tmp_path}/there.db", warehouse=f"file://{tmp_path}/there") as catalog:
        handler = type("Bound", (Handler,), {"catalog": catalog})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        server.server_close()


def sink_at(address: str, folder: Path, mode: str = "mirror", **more: Any) -> IcebergSink:
    made = open_sink(
        "iceberg",
        warehouse=str(folder / "ours"),
        mode=mode,
        catalog_uri=address,
        catalog_options={"token": TOKEN},
        **more,
    )
    assert isinstance(made, IcebergSink)
    return made


@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
def test_tables_in_a_rest_catalog_that_is_a_server_of_this_test(mode: str, address: str, tmp_path: Path) -> None:
    sink = sink_at(address, tmp_path, mode, partition_by=["bucket(2, id)"])
    sink.check()
    assert TOKEN not in repr(sink)
    feed = Feed(sink)
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    assert feed.history(1, [order(key) for key in range(4)])
    assert feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)))
    assert not feed.changes(1, (INSERT, order(100)))
    assert sink.committed(ORDERS, "q", "b1") == Committed(1, 1, 0)
    with open_table(sink) as table:
        assert table.metadata.location.startswith(f"file://{tmp_path}/there/")
        assert table.scan().to_arrow().num_rows == {"mirror": 4, "changes": 7, "history": 6}[mode]
    if mode == "mirror":
        assert statuses(sink) == {0: "new", 1: "paid", 3: "new", 9: "new"}
    sink.abort(ORDERS, "q", 1)
    shown = pa.Table.from_batches(list(sink.shown(ORDERS, ["id"])))
    assert shown.num_rows == {"mirror": 4, "changes": 7, "history": 6}[mode]


def test_of_two_commits_one_is_refused_by_a_rest_catalog_that_is_a_server_of_this_test(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(address, tmp_path)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    other, ours = (feed.stage_changes(token, [(INSERT, order(2))]) for _ in range(2))
    left = [other]

    def hit(name: str) -> None:
        if name == "sink.iceberg.before_commit" and left:
            assert sink.commit(ORDERS, token, [left.pop()])

    monkeypatch.setattr(failpoints, "hit", hit)
    assert not sink.commit(ORDERS, token, [ours])
    assert statuses(sink) == {1: "new", 2: "new"}


def test_a_commit_whose_answer_is_lost_is_found_in_a_rest_catalog_that_is_a_server_of_this_test(
    address: str, tmp_path: Path
) -> None:
    """Cut off, answered with an error, and refused: a gateway repeats a commit, which its own success refuses."""
    with losing_proxy(address) as proxy:
        sink = sink_at(proxy.url, tmp_path)
        feed = Feed(sink)
        feed.history(1, [order(key) for key in range(4)])
        for epoch, status in enumerate((0, 504, 409), 1):
            proxy.lose("/tables/orders", status)
            assert feed.changes(epoch, (UPDATE, order(1, f"paid {epoch}")), (INSERT, order(epoch + 10))), status
            assert proxy.left() == ""
            assert statuses(sink)[1] == f"paid {epoch}"
        assert feed.changes(4, (INSERT, order(14)))
        assert sorted(statuses(sink)) == [0, 1, 2, 3, *range(11, 15)]


def test_a_commit_that_cannot_be_looked_up_keeps_its_files_with_a_rest_catalog_that_is_a_server_of_this_test(
    address: str, tmp_path: Path
) -> None:
    with losing_proxy(address) as proxy:
        sink = sink_at(proxy.url, tmp_path)
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)))
        token = feed.token(2)
        staged = [feed.stage_changes(token, [(UPDATE, order(1, "paid")), (INSERT, order(2))])]
        proxy.lose("/tables/orders", away=True)
        with pytest.raises(SinkUnreachable, match="did not answer"):
            sink.commit(ORDERS, token, staged)
        assert proxy.left() == ""
        proxy.come_back()
        assert not sink.commit(ORDERS, token, staged)
        assert statuses(sink) == {1: "paid", 2: "new"}
        assert feed.changes(3, (INSERT, order(3)))
        assert statuses(sink) == {1: "paid", 2: "new", 3: "new"}


def test_a_token_of_a_rest_catalog_double_that_is_rotated_in_its_file(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    sink = IcebergSink(str(tmp_path / "ours"), catalog_uri=address, catalog_options={"token": f"file:{file}"})
    feed = Feed(sink)
    assert feed.changes(1, (INSERT, order(1)))
    monkeypatch.setattr(Handler, "token", "second-token")
    with pytest.raises(SinkLoginRefused, match=address) as caught:
        feed.changes(2, (INSERT, order(2)))
    assert Failure.of(caught.value).remedy is Remedy.LOGIN
    file.write_text("second-token\n")
    assert feed.changes(2, (INSERT, order(2)))
    assert feed.changes(3, (UPDATE, order(1, "paid")))
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)


def test_a_rest_catalog_that_refuses_us_is_told_without_the_token(address: str, tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), catalog_uri=address, catalog_options={"token": "wrong-token"})
    with pytest.raises(SinkLoginRefused, match=f"The Iceberg catalog at {address} refused the login") as failed:
        sink.check()
    assert "wrong-token" not in str(failed.value)


def test_a_catalog_that_is_away_when_a_sink_starts_is_tried_again(address: str, tmp_path: Path) -> None:
    with losing_proxy(address) as proxy:
        proxy.go_away(503)
        sink = sink_at(proxy.url, tmp_path)
        with pytest.raises(SinkUnreachable, match="did not answer") as caught:
            sink.check()
        assert Failure.of(caught.value).remedy is Remedy.RETRY
        proxy.come_back()
        sink.check()
    nobody = IcebergSink(str(tmp_path / "sql"), catalog_uri="postgresql+psycopg://x:hidden@127.0.0.1:1/catalog")
    with pytest.raises(SinkUnreachable, match="did not answer") as caught:
        nobody.check()
    assert "hidden" not in str(caught.value)


def test_a_catalog_that_does_not_answer_holds_up_no_other(address: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stuck = IcebergSink(str(tmp_path / "stuck"), catalog_uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        refused: list[BaseException] = []

        def check() -> None:
            try:
                stuck.check()
            except SinkUnreachable as error:
                refused.append(error)

        thread = threading.Thread(target=check, daemon=True)
        thread.start()
        connection, _ = silent.accept()
        sink_at(address, tmp_path).check()
        assert thread.is_alive()
        connection.close()
        silent.close()
        thread.join(60)
        assert refused
