"""A server that speaks enough of MySQL's protocol to ask its clients for files of their machine."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any, Final, Self

_CAPABILITIES: Final = 0x0028_F7FF  # all old ones but TLS; plugins for the login, their data with its length
_OK: Final = b"\x00\x00\x00\x02\x00\x00\x00"
_EOF: Final = b"\xfe\x00\x00\x02\x00"
_QUERY: Final = 3


class HostileServer:
    """Answers queries that contain *moment* with a request for the file *path*, all others as *answers* say, or "OK".

    :param answers: the only value of the only row, by a part of the query.
    :ivar queries: that clients sent. :ivar sent: packets that they sent after a request for a file.
    """

    def __init__(self, moment: str, path: str, answers: Mapping[str, str] | None = None) -> None:
        self._moment, self._path, self._answers = moment, path, dict(answers or {})
        self.queries: list[str] = []
        self.sent: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)

    @property
    def dsn(self) -> str:
        return f"mysql://user:password@127.0.0.1:{self._listener.getsockname()[1]}/"

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                client.settimeout(30)
                try:
                    self._converse(client)
                except (OSError, EOFError):
                    continue

    def _converse(self, client: socket.socket) -> None:
        low, high = struct.pack("<H", _CAPABILITIES & 0xFFFF), struct.pack("<H", _CAPABILITIES >> 16)
        greeting = b"\x0a8.4.0\0" + struct.pack("<I", 1) + b"12345678\0" + low + b"\xff\x02\x00" + high
        _send(client, 0, greeting + b"\x15" + bytes(10) + b"123456789012\0mysql_native_password\0")
        number, _ = _receive(client)
        _send(client, number + 1, _OK)
        while True:
            number, packet = _receive(client)
            if packet[:1] != bytes([_QUERY]):
                return
            query = packet[1:].decode()
            self.queries.append(query)
            if self._moment in query:
                _send(client, number + 1, b"\xfb" + self._path.encode())
                self._take_file(client)
                return
            value = next((value for part, value in self._answers.items() if part in query), None)
            self._answer(client, number, value)

    def _take_file(self, client: socket.socket) -> None:
        while True:
            number, packet = _receive(client)
            if not number:  # another query
                return
            if not packet:
                _send(client, number + 1, _OK)
                return
            self.sent.append(packet)

    def _answer(self, client: socket.socket, number: int, value: str | None) -> None:
        if value is None:
            _send(client, number + 1, _OK)
            return
        texts = b"".join(bytes([len(text)]) + text for text in (b"def", b"", b"", b"", b"v", b"v"))
        described = texts + b"\x0c" + struct.pack("<HIBHB", 255, 1024, 0xFD, 0, 0) + b"\0\0"
        row = bytes([len(value)]) + value.encode()
        for at, payload in enumerate((b"\x01", described, _EOF, row, _EOF)):
            _send(client, number + 1 + at, payload)


def _send(client: socket.socket, number: int, payload: bytes) -> None:
    client.sendall(len(payload).to_bytes(3, "little") + bytes([number % 256]) + payload)


def _receive(client: socket.socket) -> tuple[int, bytes]:
    head = _exactly(client, 4)
    return head[3], _exactly(client, int.from_bytes(head[:3], "little"))


def _exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received: Any = client.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data
