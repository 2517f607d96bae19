"""PythonDecoder: the row decoder that is always there, also where nothing could be compiled."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.pgoutput import HEADER, check_raw, postgres_time, protocol_error
from headwater.sources.postgres.raw_rows import RawColumn, RawRows, utf8_of
from headwater.stream import Op

_UNCHANGED: Final = b"unchanged"  # compared by identity
_ROWS: Final = frozenset(b"IUD")
_FOR_PYTHON: Final = frozenset(b"RYTMOSEcA")
_INSERT, _UPDATE, _DELETE, _BEGIN, _COMMIT = b"IUDBC"
_NEW, _KEY, _OLD = b"NKO"
_NULL, _SAME = b"nu"
_OP_INSERT, _OP_DELETE = int(Op.INSERT), int(Op.DELETE)
_OP_UPDATE_INSERT, _OP_UPDATE_DELETE = int(Op.UPDATE_INSERT), int(Op.UPDATE_DELETE)
_LAST_SEQ: Final = 0xFFFF_FFFE
_MAX_COLUMN: Final = 0x7FFF_FFFF
_LENGTH: Final = struct.Struct("!I").unpack_from
_VALUE_START: Final = struct.Struct("!BI").unpack_from
_PART_START: Final = struct.Struct("!BH").unpack_from
_BEGIN_FIELDS: Final = struct.Struct("!QQI")
_COMMIT_FIELDS: Final = struct.Struct("!BQQQ")


class _Relation:
    """The rows of one relation.

    :ivar values: value after value, row after row.
    :ivar runs: each transaction that has rows here, and the first of them.
    """

    __slots__ = ("bytes", "columns", "is_key", "keys", "ops", "runs", "seqs", "unchanged", "values")

    def __init__(self, columns: int, keys: frozenset[int]) -> None:
        self.columns, self.keys = columns, keys
        self.is_key = [place in keys for place in range(columns)]
        self.values: list[bytes | None] = []
        self.ops = bytearray()
        self.seqs = array("I")
        self.runs: list[tuple[int, tuple[int, int, int]]] = []
        self.unchanged = False
        self.bytes = 0


class PythonDecoder:
    """The decoder that is always there."""

    def __init__(self) -> None:
        self._relations: dict[int, _Relation | None] = {}
        self._transaction: tuple[int, int, int] | None = None
        self._last_commit: tuple[int, int, int] | None = None
        self._streamed = False
        self._next_seq = 0
        self._held_rows = self._held_bytes = 0

    @property
    def held_rows(self) -> int:
        return self._held_rows

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    @property
    def transaction(self) -> tuple[int, int, int] | None:
        return self._transaction

    @property
    def last_commit(self) -> tuple[int, int, int] | None:
        return self._last_commit

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @next_seq.setter
    def next_seq(self, seq: int) -> None:
        if not 0 <= seq <= _LAST_SEQ:
            raise ValueError("next_seq has 32 bits")
        self._next_seq = seq

    def add_relation(self, oid: int, columns: int, key_columns: Sequence[int], /) -> None:
        if not 0 <= oid < 1 << 32 or not 0 <= columns < 1 << 16:
            raise ValueError("an oid has 32 bits, a relation at most 65535 columns")
        if any(not 0 <= place < columns for place in key_columns):
            raise ValueError("a key column is none of the columns")
        self._replace(oid, _Relation(columns, frozenset(key_columns)))

    def ignore_relation(self, oid: int, /) -> None:
        self._replace(oid, None)

    def _replace(self, oid: int, relation: _Relation | None) -> None:
        old = self._relations.get(oid)
        if old is not None and old.ops:
            raise ValueError("rows of the relation are held: take() them first")
        self._relations[oid] = relation

    def begin_streamed(self, commit_lsn: int, commit_time: int, xid: int, /) -> None:
        if self._transaction is not None:
            raise protocol_error("a streamed transaction begins inside another.")
        self._transaction, self._streamed, self._next_seq = (commit_lsn, commit_time, xid), True, 0

    def end_streamed(self) -> None:
        if not self._streamed:
            raise protocol_error("a streamed transaction ends that did not begin.")
        self._transaction, self._streamed = None, False

    def feed(self, messages: list[bytes], start: int, *, max_rows: int, max_bytes: int, stop_at_commit: bool) -> int:
        if start < 0 or max_rows < 1 or max_bytes < 1:
            raise ValueError("start is at least 0, max_rows and max_bytes at least 1")
        for place in range(start, len(messages)):
            message = messages[place]
            if len(message) <= HEADER or message[0] != 0x77:
                check_raw(message)
            kind = message[HEADER]
            if kind in _ROWS:
                if self._held_rows >= max_rows or self._held_bytes >= max_bytes:
                    return place
                if not self._row(kind, message, HEADER + 5 if self._streamed else HEADER + 1):
                    return place
            elif kind == _BEGIN:
                self._begin(message)
            elif kind == _COMMIT:
                self._commit(message)
                if stop_at_commit:
                    return place + 1
            elif kind in _FOR_PYTHON:
                return place
            else:
                raise protocol_error("a message of an unknown type.")
        return max(start, len(messages))

    def _begin(self, message: bytes) -> None:
        if self._transaction is not None:
            raise protocol_error("a transaction begins inside another.")
        if len(message) != HEADER + 1 + _BEGIN_FIELDS.size:
            raise protocol_error("a begin has the wrong length.")
        commit_lsn, commit_time, xid = _BEGIN_FIELDS.unpack_from(message, HEADER + 1)
        self._transaction, self._next_seq = (commit_lsn, postgres_time(commit_time), xid), 0

    def _commit(self, message: bytes) -> None:
        if self._transaction is None or self._streamed:
            raise protocol_error("a commit without its begin.")
        if len(message) != HEADER + 1 + _COMMIT_FIELDS.size:
            raise protocol_error("a commit has the wrong length.")
        _, commit_lsn, end_lsn, commit_time = _COMMIT_FIELDS.unpack_from(message, HEADER + 1)
        if commit_lsn != self._transaction[0]:
            raise protocol_error("a commit is not that of its begin.")
        self._last_commit = (commit_lsn, end_lsn, postgres_time(commit_time))
        self._transaction = None

    def _row(self, kind: int, message: bytes, at: int) -> bool:
        """Take one row message; ``False`` where a column would grow beyond what Arrow's offsets can say."""
        transaction = self._transaction
        if transaction is None:
            raise protocol_error("a row outside of a transaction.")
        if len(message) < at + 5:
            raise protocol_error("a row is cut off.")
        oid, part = _LENGTH(message, at)[0], message[at + 4]
        if oid not in self._relations:
            raise protocol_error("a row of a table that was not described.")
        has_both = kind == _UPDATE and part != _NEW
        if self._next_seq >= _LAST_SEQ:
            raise protocol_error("a transaction has more rows than can be numbered.")
        relation = self._relations[oid]
        if relation is not None:
            size = len(message)
            growth = 2 * size if has_both else size
            held = len(relation.ops)
            if held and relation.bytes + growth > _MAX_COLUMN:
                return False
            try:
                if part == _NEW and kind != _DELETE:
                    end = _tuple(relation, message, at + 4, False)
                    relation.ops.append(_OP_INSERT if kind == _INSERT else _OP_UPDATE_INSERT)
                    relation.seqs.append(self._next_seq)
                else:
                    end = self._old_row(relation, kind, message, at + 4)
                if end != size:
                    raise protocol_error("a row message has the wrong length.")
            except (struct.error, IndexError, SourceProtocolError) as error:
                del relation.ops[held:], relation.seqs[held:], relation.values[held * relation.columns :]
                if isinstance(error, SourceProtocolError):
                    raise
                raise protocol_error("a row is cut off.") from None
            if not relation.runs or relation.runs[-1][1] is not transaction:
                relation.runs.append((held, transaction))
            relation.bytes += growth
            self._held_rows += len(relation.ops) - held
            self._held_bytes += size
        self._next_seq += 2 if has_both else 1
        return True

    def _old_row(self, relation: _Relation, kind: int, message: bytes, at: int) -> int:
        """Take a delete, or an update with an old part; where the message ends."""
        part, columns, values, seq = message[at], relation.columns, relation.values, self._next_seq
        if part not in (_KEY, _OLD) or kind == _INSERT:
            raise protocol_error("a row message has not the parts that it must have.")
        first = len(values)
        at = _tuple(relation, message, at, part == _KEY)
        if kind == _DELETE:
            relation.ops.append(_OP_DELETE)
            relation.seqs.append(seq)
            return at
        if message[at] != _NEW:
            raise protocol_error("an update has no new row.")
        at = _tuple(relation, message, at, False)
        old, new = values[first : first + columns], values[first + columns :]
        if _UNCHANGED in new:
            values[first + columns :] = new = [
                before if value is _UNCHANGED and before is not None else value
                for before, value in zip(old, new, strict=True)
            ]
        if part == _KEY and all(_same(old[place], new[place]) for place in relation.keys):
            del values[first : first + columns]
            relation.ops.append(_OP_UPDATE_INSERT)
            relation.seqs.append(seq + 1)
        else:
            relation.ops += bytes((_OP_UPDATE_DELETE, _OP_UPDATE_INSERT) if part == _OLD else (_OP_DELETE, _OP_INSERT))
            relation.seqs.extend((seq, seq + 1))
        return at

    def take(self) -> list[RawRows]:
        held = [(oid, relation) for oid, relation in sorted(self._relations.items()) if relation and relation.ops]
        for oid, relation in held:
            self._relations[oid] = _Relation(relation.columns, relation.keys)
        self._held_rows = self._held_bytes = 0
        return [_rows_of(oid, relation) for oid, relation in held]


def _tuple(relation: _Relation, message: bytes, at: int, key_only: bool) -> int:
    """Append the values of one tuple, whose kind is at *at*; where it ends, which may be beyond the message."""
    _, count = _PART_START(message, at)
    if count != relation.columns:
        raise protocol_error("a row has another number of columns than its table.")
    at += 3
    values = relation.values
    append = values.append
    first = len(values)
    padded = message + b"\0\0\0\0"  # so that kind and length can be read at once, also where no length follows
    for _ in range(count):
        kind, length = _VALUE_START(padded, at)
        if kind == 116:  # t; a literal is what makes this loop quick
            start = at + 5
            at = start + length
            append(message[start:at])
        elif kind == _NULL:
            append(None)
            at += 1
        elif kind == _SAME:
            append(_UNCHANGED)
            relation.unchanged = True
            at += 1
        else:
            raise protocol_error("a value is neither text, null nor unchanged.")
    if key_only:
        values[first:] = [
            value if is_key else None for value, is_key in zip(values[first:], relation.is_key, strict=True)
        ]
    return at


def _same(one: bytes | None, other: bytes | None) -> bool:
    return one == other and (one is _UNCHANGED) == (other is _UNCHANGED)


def _rows_of(oid: int, relation: _Relation) -> RawRows:
    values, columns = relation.values, relation.columns
    starts, transactions = zip(*relation.runs, strict=True)
    lengths = np.diff([*starts, len(relation.ops)])
    lsns, times, xids = zip(*transactions, strict=True)
    return RawRows(
        oid,
        np.frombuffer(bytes(relation.ops), np.int8),
        np.repeat(np.array(lsns, np.uint64), lengths),
        np.array(relation.seqs, np.uint32),
        np.repeat(np.array(xids, np.uint32), lengths),
        np.repeat(np.array(times, np.int64), lengths),
        [_column_of(values[place::columns], relation.unchanged) for place in range(columns)],
    )


def _column_of(values: list[bytes | None], may_be_unchanged: bool) -> RawColumn:
    unchanged: NDArray[np.bool_] | None = None
    if may_be_unchanged:
        unchanged = np.fromiter((value is _UNCHANGED for value in values), np.bool_, len(values))
        if unchanged.any():
            values = [None if value is _UNCHANGED else value for value in values]
        else:
            unchanged = None
    return RawColumn(utf8_of(pa.array(values, pa.binary())), unchanged)
