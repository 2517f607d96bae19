"""The bytes of TDS 7.4 as a server writes and reads them: only what a client needs that logs in and sends batches.

Shapes are those of the public protocol description [MS-TDS]. Pure but for the socket that it is given.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.servers.sqlserver_double.values import as_sent

BATCH: Final = 1
LOGIN: Final = 16
PRELOGIN: Final = 18
ATTENTION: Final = 6
_REPLY: Final = 4
_HEADER: Final = struct.Struct(">BBHHBB")
_COLLATION: Final = b"\x09\x04\xd0\x00\x34"
_PACKET: Final = 32_767
_MOST_NVARCHAR: Final = 8_000


class Hangup(Exception):
    """The client is gone."""


def receive(connection: socket.socket) -> tuple[int, bytes]:
    """One message: its kind and its bytes, whatever packets it came in."""
    payload = bytearray()
    while True:
        kind, status, length, *_ = _HEADER.unpack(_exactly(connection, 8))
        payload += _exactly(connection, length - 8)
        if status & 1:
            return kind, bytes(payload)


def _exactly(connection: socket.socket, count: int) -> bytes:
    made = bytearray()
    while len(made) < count:
        try:
            came = connection.recv(count - len(made))
        except OSError:
            raise Hangup from None
        if not came:
            raise Hangup
        made += came
    return bytes(made)


def send(connection: socket.socket, payload: bytes, packet: int = 4096) -> None:
    """One reply, in packets."""
    room = packet - 8
    pieces = [payload[at : at + room] for at in range(0, len(payload), room)] or [b""]
    made = bytearray()
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        made += _HEADER.pack(_REPLY, int(last), len(piece) + 8, 0, (number + 1) & 0xFF, 0) + piece
    try:
        connection.sendall(made)
    except OSError:
        raise Hangup from None


def prelogin_reply() -> bytes:
    """A version, and that nothing is encrypted."""
    options = struct.pack(">BHH", 0, 11, 6) + struct.pack(">BHH", 1, 17, 1) + b"\xff"
    return options + bytes([16, 0, 0x10, 0x00, 0, 0]) + b"\x02"


@dataclass(frozen=True)
class Login:
    user: str
    password: str
    database: str
    packet: int


def read_login(payload: bytes) -> Login:
    def text(at: int) -> bytes:
        offset, length = struct.unpack_from("<HH", payload, at)
        return payload[offset : offset + 2 * length]

    plain = bytes((byte ^ 0xA5) >> 4 | ((byte ^ 0xA5) & 0xF) << 4 for byte in text(44))
    (packet,) = struct.unpack_from("<I", payload, 8)
    return Login(text(40).decode("utf-16le"), plain.decode("utf-16le"), text(68).decode("utf-16le"), packet)


def read_batch(payload: bytes) -> str:
    (headers,) = struct.unpack_from("<I", payload)
    return payload[headers:].decode("utf-16le")


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("utf-16le")


def _token(kind: int, body: bytes) -> bytes:
    return struct.pack("<BH", kind, len(body)) + body


def login_reply(login: Login) -> bytes:
    packet = min(max(login.packet, 512), _PACKET)
    acknowledged = b"\x01" + struct.pack(">I", 0x74000004) + _short("Microsoft SQL Server") + bytes([16, 0, 0x10, 0])
    return (
        _token(0xE3, b"\x01" + _short(login.database) + _short("master"))
        + _token(0xE3, b"\x07" + bytes([len(_COLLATION)]) + _COLLATION + b"\x00")
        + _token(0xAD, acknowledged)
        + _token(0xE3, b"\x04" + _short(str(packet)) + _short("4096"))
        + done()
    )


def done(rows: int | None = None, *, more: bool = False, cancelled: bool = False, failed: bool = False) -> bytes:
    status = (0x10 if rows is not None else 0) | int(more) | (0x20 if cancelled else 0) | (0x02 if failed else 0)
    return struct.pack("<BHHQ", 0xFD, status, 0xC1, rows or 0)


def error(number: int, text: str, severity: int = 16) -> bytes:
    body = struct.pack("<IBB", number, 1, severity) + struct.pack("<H", len(text)) + text.encode("utf-16le")
    return _token(0xAA, body + _short("double") + _short("") + struct.pack("<I", 1))


def result(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Columns and rows; the type of a column is that of its first value."""
    kinds = [_kind([row[place] for row in rows]) for place in range(len(names))]
    made = bytearray(struct.pack("<BH", 0x81, len(names)))
    for name, (_, info) in zip(names, kinds, strict=True):
        made += struct.pack("<IH", 0, 1) + info + _short(name)
    made += _token(0xA9, b"\x01\x00")  # an order, which clients pass over
    return bytes(made) + rows_of([kind for kind, _ in kinds], rows) + done(len(rows))


def rows_of(kinds: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Rows alone; those with nulls have a map of them, as servers do it."""
    made = bytearray()
    writers = [_WRITERS[kind] for kind in kinds]
    for row in rows:
        if None in row:
            nulls = sum(1 << place for place, value in enumerate(row) if value is None)
            made += b"\xd2" + nulls.to_bytes((len(row) + 7) // 8, "little")
        else:
            made.append(0xD1)
        for writer, value in zip(writers, row, strict=True):
            if value is not None:
                made += writer(value)
    return bytes(made)


def _kind(values: Sequence[Any]) -> tuple[str, bytes]:
    found: Any = type(next((value for value in values if value is not None), None))
    longest = 0
    if found is str or found is bytes:
        longest = max(len(value) for value in values if value is not None)
    if found is bool:
        return "bit", bytes([0x68, 1])
    if found is int:
        return "int", bytes([0x26, 8])
    if found is float:
        return "float", bytes([0x6D, 8])
    if found is bytes:
        is_long = longest > _MOST_NVARCHAR
        return "long bytes" if is_long else "bytes", struct.pack("<BH", 0xA5, 0xFFFF if is_long else _MOST_NVARCHAR)
    is_long = 2 * longest > _MOST_NVARCHAR
    size = 0xFFFF if is_long else _MOST_NVARCHAR
    return "long text" if is_long else "text", struct.pack("<BH", 0xE7, size) + _COLLATION


def _plp(data: bytes | None) -> bytes:
    if data is None:
        return b"\xff" * 8
    chunk = struct.pack("<I", len(data)) + data if data else b""
    return struct.pack("<Q", len(data)) + chunk + struct.pack("<I", 0)


def _counted(data: bytes | None) -> bytes:
    return b"\xff\xff" if data is None else struct.pack("<H", len(data)) + data


def _coded(value: str | None) -> bytes | None:
    return None if value is None else as_sent(value)


_WRITERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "bit": lambda value: b"\x00" if value is None else bytes([1, int(value)]),
    "int": lambda value: b"\x00" if value is None else struct.pack("<Bq", 8, value),
    "float": lambda value: b"\x00" if value is None else struct.pack("<Bd", 8, value),
    "bytes": _counted,
    "long bytes": _plp,
    "text": lambda value: _counted(_coded(value)),
    "long text": lambda value: _plp(_coded(value)),
}
