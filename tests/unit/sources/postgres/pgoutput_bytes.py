"""pgoutput messages written by hand, from the protocol's documentation alone: what the decoders are tested with."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UNCHANGED = object()
"""A value that the server leaves out because it is unchanged."""

Value = bytes | str | None | object


def raw(content: bytes) -> bytes:
    """The message as it comes in CopyData."""
    return b"w" + struct.pack(">QQq", 0x1_0000_0000, 0x1_0000_0100, 42) + content


def row(values: Sequence[Value]) -> bytes:
    """TupleData."""
    parts = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            assert isinstance(value, str | bytes)
            data = value.encode() if isinstance(value, str) else value
            parts.append(b"t" + struct.pack(">i", len(data)) + data)
    return b"".join(parts)


def _start(kind: bytes, xid: int | None, oid: int) -> bytes:
    return kind + (b"" if xid is None else struct.pack(">I", xid)) + struct.pack(">I", oid)


def begin(commit_lsn: int, commit_time: int = 0, xid: int = 7) -> bytes:
    return raw(b"B" + struct.pack(">QqI", commit_lsn, commit_time, xid))


def commit(commit_lsn: int, end_lsn: int | None = None, commit_time: int = 0) -> bytes:
    end = commit_lsn + 8 if end_lsn is None else end_lsn
    return raw(b"C" + struct.pack(">bQQq", 0, commit_lsn, end, commit_time))


def insert(oid: int, values: Sequence[Value], xid: int | None = None) -> bytes:
    return raw(_start(b"I", xid, oid) + b"N" + row(values))


def update(
    oid: int,
    new: Sequence[Value],
    *,
    key: Sequence[Value] | None = None,
    old: Sequence[Value] | None = None,
    xid: int | None = None,
) -> bytes:
    before = b"K" + row(key) if key is not None else b"O" + row(old) if old is not None else b""
    return raw(_start(b"U", xid, oid) + before + b"N" + row(new))


def delete(
    oid: int, *, key: Sequence[Value] | None = None, old: Sequence[Value] | None = None, xid: int | None = None
) -> bytes:
    before = b"K" + row(key) if key is not None else b"O" + row(old or ())
    return raw(_start(b"D", xid, oid) + before)


def relation(
    oid: int,
    namespace: str,
    name: str,
    columns: Sequence[tuple[str, bool, int, int]],
    identity: str = "d",
    xid: int | None = None,
) -> bytes:
    parts = [_start(b"R", xid, oid), namespace.encode(), b"\0", name.encode(), b"\0", identity.encode()]
    parts.append(struct.pack(">h", len(columns)))
    for column, is_key, type_oid, typmod in columns:
        parts.append(struct.pack(">b", is_key) + column.encode() + b"\0" + struct.pack(">Ii", type_oid, typmod))
    return raw(b"".join(parts))


def type_(oid: int, namespace: str, name: str, xid: int | None = None) -> bytes:
    return raw(_start(b"Y", xid, oid) + namespace.encode() + b"\0" + name.encode() + b"\0")


def truncate(oids: Sequence[int], options: int = 0, xid: int | None = None) -> bytes:
    prefix = b"" if xid is None else struct.pack(">I", xid)
    return raw(b"T" + prefix + struct.pack(f">ib{len(oids)}I", len(oids), options, *oids))


def message(lsn: int, prefix: str, content: bytes, *, transactional: bool = True, xid: int | None = None) -> bytes:
    start = b"" if xid is None else struct.pack(">I", xid)
    body = struct.pack(">bQ", transactional, lsn) + prefix.encode() + b"\0" + struct.pack(">i", len(content)) + content
    return raw(b"M" + start + body)


def origin(lsn: int, name: str) -> bytes:
    return raw(b"O" + struct.pack(">Q", lsn) + name.encode() + b"\0")


def stream_start(xid: int, *, first: bool = True) -> bytes:
    return raw(b"S" + struct.pack(">Ib", xid, first))


def stream_stop() -> bytes:
    return raw(b"E")


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, commit_time: int = 0) -> bytes:
    return raw(b"c" + struct.pack(">IbQQq", xid, 0, commit_lsn, end_lsn, commit_time))


def stream_abort(xid: int, subxid: int) -> bytes:
    return raw(b"A" + struct.pack(">II", xid, subxid))
