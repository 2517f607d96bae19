"""Lsn: a number of SQL Server's log, ten bytes: the virtual log file, the block in it, the record in the block. Pure.

The server writes it as ``0x00000027000007580005`` or as ``00000027:00000758:0005``; numbers grow as the log does.
"""

from __future__ import annotations

import re
from typing import Final

from headwater.sources.errors import InvalidOffset

_COLONS: Final = re.compile(r"([0-9A-Fa-f]{8}):([0-9A-Fa-f]{8}):([0-9A-Fa-f]{4})")
_PLAIN: Final = re.compile(r"(?:0[xX])?([0-9A-Fa-f]{20})")

_FILE_BITS: Final = 24
_BLOCK_BITS: Final = 26
_RECORD_BITS: Final = 12


class Lsn(int):
    """One number.

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
