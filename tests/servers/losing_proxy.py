"""A proxy before an HTTP server that loses answers to requests which the server took, or lets no request through.

It is a separate process: clients in this one can hold the interpreter while they wait for an answer.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

_LOSE = "/_lose/"
_AWAY = "/_away/"
_KEY = "/_key/"
_CUT = 0
_LEAVE = -1


class LosingProxy:
    """:ivar url: its address, for clients of the server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def lose(self, pattern: str, status: int = _CUT, *, away: bool = False) -> None:
        """Lose the answer to the next PUT or POST whose path ends with *pattern*, a regular expression.

        :param status: answer this instead; by default the connection is cut.
        :param away: go away with it, until :meth:`come_back`.
        """
        self._ask(f"{_LOSE}{_LEAVE if away else status}/{quote(pattern, safe='')}")

    def left(self) -> str:
        """The answers that are to be lost and were not yet."""
        return self._ask(_LOSE)

    def go_away(self, status: int = _CUT, pattern: str = ".*") -> None:
        """Cut each connection, or answer *status*, before the server sees the request; until :meth:`come_back`.

        :param pattern: only requests whose path ends with this regular expression.
        """
        self._ask(f"{_AWAY}{status}/{quote(pattern, safe='')}")

    def come_back(self) -> None:
        """Forward requests again."""
        self._ask(_AWAY)

    def take_only(self, key: str = "") -> None:
        """Answer 403 to requests that are not signed with the access key *key*; by default take all."""
        self._ask(f"{_KEY}{quote(key, safe='')}")

    def _ask(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path) as answer:
            text: bytes = answer.read()
        return text.decode()


@contextmanager
def losing_proxy(url: str) -> Iterator[LosingProxy]:
    """A proxy before the server at *url*."""
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
    left: list[tuple[str, int]] = []  # noqa: RUF012 (one server per process)
    away: tuple[str, int] | None = None
    key = ""


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _forward(self) -> None:
        if self.path.startswith((_LOSE, _AWAY)):
            self._obey()
            return
        if self.path.startswith(_KEY):
            self.server.key = unquote(self.path.removeprefix(_KEY))
            self._answer(200, [], b"")
            return
        if self.server.key and f"Credential={self.server.key}/" not in self.headers.get("Authorization", ""):
            self._refuse(403)
            return
        away = self.server.away
        if away is not None and self._matches(away[0]):
            self._refuse(away[1])
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        left_out = ("expect", "transfer-encoding", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        for lost in self.server.left if self.command in ("PUT", "POST") else ():
            if self._matches(lost[0]):
                self.server.left.remove(lost)
                if lost[1] == _LEAVE:
                    self.server.away = (".*", _CUT)
                self._refuse(max(lost[1], _CUT))
                return
        self._answer(answer.status, answer.getheaders(), data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return body

    def _matches(self, pattern: str) -> bool:
        return re.search(f"(?:{pattern})$", unquote(urlsplit(self.path).path)) is not None

    def _obey(self) -> None:
        status, _, pattern = self.path.removeprefix(_AWAY).removeprefix(_LOSE).partition("/")
        order = (unquote(pattern), int(status)) if status else None
        if self.path.startswith(_AWAY):
            self.server.away = order
        elif order is not None:
            self.server.left.append(order)
        self._answer(200, [], " ".join(pattern for pattern, _ in self.server.left).encode())

    def _refuse(self, status: int) -> None:
        self.close_connection = True
        if status != _CUT:
            self._answer(status, [("Connection", "close")], b"")

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
