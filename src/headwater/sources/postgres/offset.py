"""PostgresOffset: a place in the commit order of a Postgres server.

A transaction's place is the LSN of its commit record; a row's place is that and its number in the transaction. The LSN
of the row's own record is not used: transactions interleave in the WAL, so it goes back where commits go on.

=========================  =============================  ==========================================================
place                      rank                           meaning
=========================  =============================  ==========================================================
``PostgresOffset.at(L)``   ``(L, -1, 0)``                 all that committed below L is before it, all else after
row *n* of commit C        ``(C, n, 0)``                  in the transaction that commits at C
end of commit C            ``(C, END, 0)``                the whole transaction is before it
read from older state      ``(C, END, P)``                commit C was the last whole one, record P was seen after it
=========================  =============================  ==========================================================

The last form ranks below every row of the transaction that P belongs to: going on from there repeats, it never skips.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidOffset
from headwater.sources.offset import CdcOffset

END_OF_TRANSACTION: Final = 0xFFFF_FFFF
"""The number after every row of a transaction."""

POSITION_TYPE: Final = pa.binary(16)
"""``_position``: commit LSN (8 bytes), number in the transaction (4), xid (4); big endian, so bytes sort as commits."""

_POSITION: Final = struct.Struct("!QII")
POSITION_DTYPE: Final = np.dtype([("commit_lsn", ">u8"), ("seq", ">u4"), ("xid", ">u4")])
_LSN: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A byte position in the WAL, written ``16/B374D848``."""

    __slots__ = ()

    def __new__(cls, value: int) -> Self:
        if not 0 <= value < 1 << 64:
            raise InvalidOffset("An LSN is a number of 64 bits.", next_step="Give one like 16/B374D848.")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """:raises InvalidOffset: *text* is not two hexadecimal numbers with a slash between."""
        found = _LSN.fullmatch(text)
        if found is None:
            raise InvalidOffset("The text is no LSN.", next_step="Give one like 16/B374D848.")
        return cls(int(found[1], 16) << 32 | int(found[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False)
class PostgresOffset(CdcOffset):
    """One place. :meth:`at`, :meth:`of_row` and :meth:`end_of` make the usual ones.

    :ivar lsn: what the server may be told: it sends again whatever commits at or after this.
    :ivar commit_lsn: the place of the transaction in the commit order.
    :ivar seq: the number in the transaction; ``None`` where the place is between transactions.
    :ivar xid: the transaction, where it is known; not part of the order.
    :ivar proc_lsn: only in state of older form, see above.
    """

    kind: ClassVar[str] = "Postgres"

    lsn: Lsn
    commit_lsn: Lsn
    seq: int | None
    xid: int | None = None
    proc_lsn: Lsn | None = None

    @classmethod
    def at(cls, lsn: int, xid: int | None = None) -> PostgresOffset:
        """The place in the log that the server gave when it was asked."""
        return cls(Lsn(lsn), Lsn(lsn), None, xid)

    @classmethod
    def of_row(cls, commit_lsn: int, seq: int, xid: int) -> PostgresOffset:
        """The place of row *seq*: the transaction is not over, so the server is to send it again."""
        return cls(Lsn(commit_lsn), Lsn(commit_lsn), seq, xid)

    @classmethod
    def end_of(cls, commit_lsn: int, end_lsn: int, xid: int) -> PostgresOffset:
        """The place after the whole transaction, whose commit record ends at *end_lsn*."""
        return cls(Lsn(end_lsn), Lsn(commit_lsn), END_OF_TRANSACTION, xid)

    @property
    def is_boundary(self) -> bool:
        """Whether no transaction is half way here."""
        return self.seq is None or (self.seq == END_OF_TRANSACTION and self.proc_lsn is None)

    def rank(self) -> tuple[int, ...]:
        return self.commit_lsn, -1 if self.seq is None else self.seq, self.proc_lsn or 0

    def position_after(self, last: bytes | None) -> bytes:
        # a commit record is longer than a byte, so the next commit is at least two after the last
        lsn = self.lsn - 1 if last is None else PostgresOffset.from_position(last).commit_lsn + 1
        return _POSITION.pack(max(lsn, 0), 0, 0)

    @classmethod
    def from_position(cls, position: bytes) -> PostgresOffset:
        """The place that a row's ``_position`` names.

        :raises InvalidOffset: not 16 bytes.
        """
        if len(position) != _POSITION.size:
            raise InvalidOffset(f"Received a position of {len(position)} bytes; valid are {_POSITION.size}.")
        return cls.of_row(*_POSITION.unpack(position))

    def to_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"txid": self.xid, "lsn": int(self.lsn)}
        if self.proc_lsn is not None:
            return fields | {"lsn_commit": int(self.commit_lsn), "lsn_proc": int(self.proc_lsn)}
        if self.seq is not None:
            return fields | {"lsn_commit": int(self.commit_lsn), "seq": self.seq}
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PostgresOffset:
        lsn, xid = _number(fields, "lsn"), _optional(fields, "txid")
        commit, proc, seq = (_optional(fields, name) for name in ("lsn_commit", "lsn_proc", "seq"))
        if seq is not None:
            if seq > END_OF_TRANSACTION:
                raise InvalidOffset("The field 'seq' of a Postgres position is a number of 32 bits.")
            return cls(Lsn(lsn), Lsn(_number(fields, "lsn_commit")), seq, xid)
        if proc is not None:
            return cls(Lsn(lsn), Lsn(commit or 0), END_OF_TRANSACTION, xid, Lsn(proc))
        if commit is not None:
            raise InvalidOffset("A Postgres position with 'lsn_commit' needs 'seq' or 'lsn_proc'.")
        return cls.at(lsn, xid)


def positions_of(
    commit_lsn: NDArray[np.uint64], seq: NDArray[np.uint32], xid: NDArray[np.uint32]
) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of rows."""
    made = np.empty(len(commit_lsn), POSITION_DTYPE)
    made["commit_lsn"], made["seq"], made["xid"] = commit_lsn, seq, xid
    return pa.Array.from_buffers(POSITION_TYPE, len(made), [None, pa.py_buffer(made)])


def _optional(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _number(fields, name)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise InvalidOffset(
            f"The field {name!r} of a Postgres position is missing or no number of 64 bits.",
            next_step="Give the text that to_json() wrote.",
        )
    return value
