"""A proxy before an object store that loses answers to requests which the store took.

A process of its own: clients in this one may hold the interpreter while they wait for an answer.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_LOSE = "/_lose/"


class LosingProxy:
    """:ivar url: its address, for clients of the object store."""

    def __init__(self, url: str) -> None:
        self.url = url

    def lose(self, ending: str) -> None:
        """Lose the answer to the next PUT of a name that ends with *ending*."""
        urllib.request.urlopen(f"{self.url}{_LOSE}{ending}").close()

    def left(self) -> str:
        """What is to be lost and was not yet."""
        with urllib.request.urlopen(f"{self.url}{_LOSE}") as answer:
            found: bytes = answer.read()
        return found.decode()


@contextmanager
def losing_proxy(url: str) -> Iterator[LosingProxy]:
    """A proxy before the object store at *url*."""
    command = [sys.executable, "-m", "tests.servers.losing_proxy", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield LosingProxy(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.communicate()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    upstream = ""
    left: list[str] = []  # noqa: RUF012 (one server per process)


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _forward(self) -> None:
        if self.path.startswith(_LOSE):
            self.server.left += filter(None, [self.path.removeprefix(_LOSE)])
            self._answer(200, [], " ".join(self.server.left).encode())
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        name = urlsplit(self.path).path
        lost = [one for one in self.server.left if self.command == "PUT" and name.endswith(one)]
        if lost:
            self.server.left.remove(lost[0])
            self.close_connection = True
            return
        self._answer(answer.status, answer.getheaders(), data)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response(status)
        size = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                size = value
            elif name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815 (the library's names)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    _Server.upstream = urlsplit(sys.argv[1]).netloc
    server = _Server(("127.0.0.1", 0), _Forwarding)
    print(server.server_address[1], flush=True)
    server.serve_forever()
