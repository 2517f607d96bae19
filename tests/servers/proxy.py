"""A TCP proxy for tests: forwards, and on command cuts, refuses, stalls or swallows."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Self

_PIECE = 1 << 16


class TcpProxy:
    """Forwards ``127.0.0.1:port`` to a target until told otherwise; connections are counted in ``accepted``."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        self._refusing = False
        self._swallowing = False
        self._swallowed: set[socket.socket] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections at once, by reset; new ones are taken."""
        with self._lock:
            ended, self._open = self._open, set()
        for end in ended:
            _reset(end)

    def refuse(self, refusing: bool = True) -> None:
        """End each new connection at once; those that are open stay."""
        self._refusing = refusing

    def stall(self) -> None:
        """Forward nothing more, with all connections open, until :meth:`resume`."""
        self._flowing.clear()

    def swallow(self) -> None:
        """Take all bytes in both directions and forward none, also of new connections until :meth:`resume`.

        Connections of before :meth:`resume` stay so: open, acknowledged and silent.
        """
        with self._lock:
            self._swallowing = True
            self._swallowed |= self._open

    def resume(self) -> None:
        """Forward again, and take connections again."""
        self._refusing = self._swallowing = False
        self._flowing.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flowing.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
                if self._swallowing:
                    self._swallowed |= {client, server}
            for source, target, change in ((client, server, self.to_server), (server, client, self.to_client)):
                threading.Thread(target=self._forward, args=(source, target, change), daemon=True).start()

    def to_server(self, piece: bytes) -> bytes:
        """What the server gets of *piece*.

        :raises ConnectionAbortedError: nothing: the client gets the error's bytes, and the connection ends.
        """
        return piece

    def to_client(self, piece: bytes) -> bytes:
        """What the client gets of *piece*."""
        return piece

    def _forward(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while piece := source.recv(_PIECE):
                self._flowing.wait()
                if source not in self._swallowed:
                    target.sendall(change(piece))
            target.shutdown(socket.SHUT_WR)
        except ConnectionAbortedError as refused:
            with contextlib.suppress(OSError):
                source.sendall(refused.args[0])
                source.shutdown(socket.SHUT_WR)
                source.recv(_PIECE)
            self._end(source, target)
        except (OSError, ValueError):
            self._end(source, target)

    def _end(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open -= set(ends)
        for end in ends:
            _reset(end)


class CommitLosingProxy(TcpProxy):
    """Stands before a database, and on command forwards one ``COMMIT`` and loses its answer with the connection.

    :ivar losing: lose the answer to the next one. :ivar lost: how many were lost.
    """

    losing = False
    lost = 0
    _is_sent = False

    def to_server(self, piece: bytes) -> bytes:
        if self.losing and b"COMMIT" in piece:
            self.losing, self._is_sent = False, True
        return piece

    def to_client(self, piece: bytes) -> bytes:
        if self._is_sent:
            self._is_sent = False
            self.lost += 1
            raise ConnectionResetError
        return piece


class PoolerProxy(TcpProxy):
    """Stands before Postgres as a connection pooler does: no replication, and process numbers of its own."""

    def to_server(self, piece: bytes) -> bytes:
        if b"\0replication\0" in piece:
            said = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: replication\0\0"
            raise ConnectionAbortedError(b"E" + (len(said) + 4).to_bytes(4, "big") + said)
        return piece

    def to_client(self, piece: bytes) -> bytes:
        return re.sub(rb"K\0\0\0\x0c.{4}(?=.{4}Z\0\0\0\x05)", b"K\0\0\0\x0c\x7f\0\0\x01", piece, flags=re.DOTALL)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        end.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        end.close()
