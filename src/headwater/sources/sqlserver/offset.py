"""SqlServerOffset: a place in the commit order of one database of SQL Server.

Every commit has a log sequence number. Within it, changes are ordered by the number of the change, by how many have the
same, and by the operation: the old half of an update comes before the new one.

=======================  ==========================================  ==================================================
place                    rank                                        meaning
=======================  ==========================================  ==================================================
row of a transaction     ``(commit, 0, change, serial, operation)``  the change itself
between transactions     ``(commit, 1, 0, 0, 0)``                    all that committed up to *commit* is before it
=======================  ==========================================  ==================================================

Between transactions the log goes on without changes. A place there also has the last commit that was really told, which
is no part of the order: a commit that is shown later and lies between the two was held back, and must not be skipped.

The JSON form::

    {"SqlServer": {"commit_lsn": "0x00000027000007580005"}}
    {"SqlServer": {"commit_lsn": "0x00000027000007580005", "told_lsn": "0x00000027000007400003"}}
    {"SqlServer": {"change_lsn": "0x0000…", "commit_lsn": "0x0000…", "event_serial_no": 1, "operation": 4}}

Without ``told_lsn``, which earlier releases did not write, it is ``commit_lsn`` itself. Numbers may also be written
with colons, ``00000027:00000758:0005``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import CommitsCameLate, InvalidOffset
from headwater.sources.offset import CdcOffset, position_rows
from headwater.sources.snapshots import PositionMark

_COLONS: Final = re.compile(r"([0-9A-Fa-f]{8}):([0-9A-Fa-f]{8}):([0-9A-Fa-f]{4})")
_PLAIN: Final = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{20})")

_FILE_BITS: Final = 24
_BLOCK_BITS: Final = 26
_RECORD_BITS: Final = 12


class Lsn(int):
    """A number of the log, ten bytes: the virtual log file, the block in it, the record in the block.

    The server writes it as ``0x00000027000007580005`` or as ``00000027:00000758:0005``; numbers grow as the log does.

    >>> Lsn.parse("00000027:00000758:0005").hex
    '0x00000027000007580005'
    """

    @classmethod
    def parse(cls, value: str | bytes) -> Lsn:
        """:raises InvalidOffset: it is no such number."""
        if isinstance(value, bytes):
            if len(value) != 10:
                raise _invalid()
            return cls(int.from_bytes(value, "big"))
        found = _COLONS.fullmatch(value) or _PLAIN.fullmatch(value)
        if found is None:
            raise _invalid()
        return cls(int("".join(found.groups()), 16))

    @classmethod
    def of_decimal(cls, value: int) -> Lsn:
        """From the decimal form of views about replicas and backups: file, ten digits of block, five of record."""
        return cls(value // 10**15 << 48 | value // 10**5 % 10**10 << 16 | value % 10**5)

    @property
    def hex(self) -> str:
        """As a statement has it, and as the server prints it."""
        return f"0x{int(self):020X}"

    @property
    def following(self) -> Lsn:
        """The next one: what ``sys.fn_cdc_increment_lsn`` gives."""
        return Lsn(self + 1)

    @property
    def preceding(self) -> Lsn:
        """The one before: what ``sys.fn_cdc_decrement_lsn`` gives."""
        return Lsn(self - 1)

    @property
    def place(self) -> int:
        """The same order in 63 bits, even: the odd numbers between are free for rows of history.

        :raises InvalidOffset: a file, a block or a record has a larger number than servers have.
        """
        file, block, record = self >> 48, self >> 16 & 0xFFFFFFFF, self & 0xFFFF
        if file >> _FILE_BITS or block >> _BLOCK_BITS or record >> _RECORD_BITS:
            raise InvalidOffset(
                f"The log sequence number {self.hex} is larger than those that a position can hold.",
                next_step="Report it with the sizes of the virtual log files: sys.dm_db_log_info(DB_ID()).",
            )
        return (file << _BLOCK_BITS + _RECORD_BITS | block << _RECORD_BITS | record) << 1


def _invalid() -> InvalidOffset:
    return InvalidOffset(
        "A log sequence number of SQL Server has ten bytes.", next_step="Give one like 00000027:00000758:0005."
    )


POSITION_TYPE: Final = pa.binary(16)
"""``_position``: place of the commit (8 bytes), number in it (4), 0 (4); big endian, so bytes sort as commits."""

POSITION_DTYPE: Final = np.dtype([("place", ">u8"), ("seq", ">u4"), ("zero", ">u4")])
_POSITION: Final = struct.Struct("!QII")
_NEXT_STEP: Final = "Give the text that to_json() wrote."
OPERATIONS: Final = range(1, 5)
"""Delete, insert, and the old and the new row of an update."""


@dataclass(frozen=True, slots=True, eq=False)
class SqlServerOffset(CdcOffset):
    """One place.

    :ivar change_lsn: of a change; ``None`` where the place is between transactions, and so the two that follow.
    :ivar serial: the number among those with the same, from 0.
    :ivar operation: see :data:`OPERATIONS`.
    :ivar told_lsn: the last commit before the place that the server has shown; ``None``: *commit_lsn*.
    """

    kind: ClassVar[str] = "SqlServer"

    commit_lsn: Lsn
    change_lsn: Lsn | None = None
    serial: int = 0
    operation: int = 0
    told_lsn: Lsn | None = None

    @property
    def told(self) -> Lsn:
        """The last commit that the server has shown: those that follow it are asked for."""
        return self.commit_lsn if self.told_lsn is None else self.told_lsn

    @property
    def is_boundary(self) -> bool:
        """Whether no transaction is half way here."""
        return self.change_lsn is None

    def rank(self) -> tuple[int, ...]:
        if self.change_lsn is None:
            return self.commit_lsn, 1, 0, 0, 0
        return self.commit_lsn, 0, self.change_lsn, self.serial, self.operation

    def position_after(self, last: bytes | None) -> bytes:
        if last is None:
            return _POSITION.pack(self.commit_lsn.place | 1, 0, 0)
        if len(last) != _POSITION.size:
            raise InvalidOffset(f"Received a position of {len(last)} bytes; valid are {_POSITION.size}.")
        return _POSITION.pack(_POSITION.unpack(last)[0] | 1, 0, 0)

    def to_fields(self) -> dict[str, Any]:
        if self.change_lsn is None:
            told = {} if self.told == self.commit_lsn else {"told_lsn": self.told.hex}
            return {"commit_lsn": self.commit_lsn.hex} | told
        return {
            "commit_lsn": self.commit_lsn.hex,
            "change_lsn": self.change_lsn.hex,
            "event_serial_no": self.serial,
            "operation": self.operation,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SqlServerOffset:
        commit, change, told = fields.get("commit_lsn"), fields.get("change_lsn"), fields.get("told_lsn")
        serial, operation = fields.get("event_serial_no", 0), fields.get("operation", 0)
        if type(commit) is not str or not (change is None or type(change) is str):
            raise InvalidOffset("A SQL Server position has no commit_lsn, or no text there.", next_step=_NEXT_STEP)
        is_serial = type(serial) is int and 0 <= serial < 1 << 32
        if not is_serial or type(operation) is not int or operation not in (0, *OPERATIONS):
            raise InvalidOffset(
                "The event_serial_no or the operation of a SQL Server position is no such number.",
                next_step=_NEXT_STEP,
            )
        made = Lsn.parse(commit)
        made.place  # noqa: B018 - refused here rather than in the middle of a capture
        if change is not None:
            return cls(made, Lsn.parse(change), serial, operation)
        if told is None:
            return cls(made)
        if type(told) is not str or (shown := Lsn.parse(told)) > made:
            raise InvalidOffset("The told_lsn of a SQL Server position lies behind it.", next_step=_NEXT_STEP)
        return cls(made, told_lsn=shown)


@dataclass(frozen=True, slots=True)
class SqlServerMark(PositionMark[SqlServerOffset]):
    """What a snapshot at one place, between transactions, contains: every commit up to its number.

    That nothing else lies before the number is what the server said; a commit that it had not shown by then and that
    lies before it proves it wrong. A mark therefore knows the last one that was shown, and is an error where a later
    change has another one below the number: the rows that were read may not have it.
    """

    kind: ClassVar[str] = "SqlServer"
    offset_type: ClassVar[type[CdcOffset]] = SqlServerOffset

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """:raises CommitsCameLate: one of a commit that the server had not shown when it said that there was none."""
        places = position_rows(positions, POSITION_DTYPE)["place"].astype(np.uint64)
        contained: NDArray[np.bool_] = places <= np.uint64(self.at.commit_lsn.place)
        if (contained & (places > np.uint64(self.at.told.place))).any():
            raise CommitsCameLate(
                f"The server showed a commit before {self.at.commit_lsn.hex} after a history was read there: its"
                " capture job had been held back from the log.",
                next_step="Run: headwater resnapshot",
            )
        return contained


def positions_of(places: NDArray[np.uint64], seq: NDArray[np.uint32]) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of rows."""
    made = np.zeros(len(places), POSITION_DTYPE)
    made["place"], made["seq"] = places, seq
    return pa.Array.from_buffers(POSITION_TYPE, len(made), [None, pa.py_buffer(made)])
