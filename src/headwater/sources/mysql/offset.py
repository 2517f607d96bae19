"""MySqlOffset: a place in the commit order of a MySQL or MariaDB server.

Where the server numbers its transactions globally (MariaDB always, MySQL with ``gtid_mode = ON``) a place is the set of
those that lie before it, and :attr:`MySqlOffset.place` counts them: the same on every server of a replication
topology, so positions keep their order after a failover. Otherwise a place is a binlog file and a position in it, which
mean something on one server only. The file's number is compared as a number: ``binlog.1000000`` follows
``binlog.999999``.

=========================  =====================  ===================================================
place                      rank                   meaning
=========================  =====================  ===================================================
between transactions       ``(place, -1)``        all that have a lower place are before it
row *n* of a transaction   ``(place, n)``         *place* is that of the boundary before the transaction
=========================  =====================  ===================================================

Places are even and at least 2; the odd numbers between them are free for rows of history.

The JSON form::

    {"MySql": {"filename": "binlog.000007", "gtid_set": "3e11fa47-…:1-23", "position": 659, "server": "3e11fa47-…"}}

``gtid_pos`` stands in place of ``gtid_set`` for MariaDB; neither where the server has none.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import ForeignOffset, InvalidOffset
from headwater.sources.mysql.gtid import Gtids, MariaDbGtids, MySqlGtids, contains
from headwater.sources.offset import CdcOffset, position_rows
from headwater.sources.snapshots import PositionMark

POSITION_TYPE: Final = pa.binary(16)
"""``_position``: place (8 bytes), number in the transaction (4), 0 (4); big endian, so bytes sort as commits."""

POSITION_DTYPE: Final = np.dtype([("place", ">u8"), ("seq", ">u4"), ("zero", ">u4")])
_POSITION: Final = struct.Struct("!QII")
_STEP: Final = 2
_FILE_BITS: Final = 32
_GRAIN_BITS: Final = 4  # two transactions begin at least 16 bytes apart
_NEXT_STEP: Final = "Give the text that to_json() wrote."


@dataclass(frozen=True, slots=True, eq=False)
class MySqlOffset(CdcOffset):
    """One place.

    :ivar filename: the binlog file in which it is; empty where only the transactions are known.
    :ivar position: the byte in that file. More than 32 bits where a transaction made the file larger than that.
    :ivar gtids: the transactions before it; ``None`` where the server does not number them.
    :ivar server: the server whose file it is; empty where it is not known.
    :ivar seq: the number in the transaction; ``None`` where the place is between transactions.
    :ivar moment: when the server was seen to be here, in microseconds since 1970; not part of the order.
    """

    kind: ClassVar[str] = "MySql"

    filename: str
    position: int
    gtids: Gtids | None = None
    server: str = ""
    seq: int | None = None
    moment: int | None = None

    @property
    def place(self) -> int:
        """The place in the commit order: the first 8 bytes of ``_position``."""
        if self.gtids is not None:
            return _STEP * (self.gtids.size + 1)
        return place_in_file(self.filename, self.position)

    @property
    def is_boundary(self) -> bool:
        """Whether no transaction is half way here."""
        return self.seq is None

    def rank(self) -> tuple[int, ...]:
        return self.place, -1 if self.seq is None else self.seq

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MySqlOffset):
            return NotImplemented
        return self.has_order_with(other) and self.rank() == other.rank()

    def __hash__(self) -> int:
        return hash((self.kind, self.rank()))

    def __lt__(self, other: object) -> bool:
        """:raises ForeignOffset: *other* is a place of another kind, or in another server's history."""
        if not isinstance(other, MySqlOffset):
            return CdcOffset.__lt__(self, other)
        if not self.has_order_with(other):
            raise ForeignOffset(
                "Two positions were compared that have no order: they are of servers with another history.",
                next_step="Compare positions of one source only.",
            )
        return self.rank() < other.rank()

    def has_passed(self, other: CdcOffset) -> bool:
        # transactions that were on their way at *other* may commit after those that this place has more
        return self >= other if not isinstance(other, MySqlOffset) or self.has_order_with(other) else False

    def has_order_with(self, other: MySqlOffset) -> bool:
        """Whether both are places in one history."""
        if self.gtids is not None and other.gtids is not None:
            return contains(self.gtids, other.gtids) or contains(other.gtids, self.gtids)
        if self.gtids is not None or other.gtids is not None:
            return False
        same_server = not self.server or not other.server or self.server == other.server
        return same_server and base_of(self.filename) == base_of(other.filename)

    def position_after(self, last: bytes | None) -> bytes:
        if last is None:
            return _POSITION.pack(self.place - 1, 0, 0)
        if len(last) != _POSITION.size:
            raise InvalidOffset(f"Received a position of {len(last)} bytes; valid are {_POSITION.size}.")
        return _POSITION.pack(_POSITION.unpack(last)[0] | 1, 0, 0)

    def to_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"filename": self.filename, "position": self.position}
        if self.server:
            fields["server"] = self.server
        if isinstance(self.gtids, MySqlGtids):
            fields["gtid_set"] = str(self.gtids)
        if isinstance(self.gtids, MariaDbGtids):
            fields["gtid_pos"] = str(self.gtids)
        if self.seq is not None:
            fields["seq"] = self.seq
        if self.moment is not None:
            fields["moment"] = self.moment
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MySqlOffset:
        filename, position = fields.get("filename"), fields.get("position")
        server, seq, moment = fields.get("server", ""), fields.get("seq"), fields.get("moment")
        gtid_set, gtid_pos = fields.get("gtid_set"), fields.get("gtid_pos")
        texts = (filename, server, "" if gtid_set is None else gtid_set, "" if gtid_pos is None else gtid_pos)
        is_number = type(position) is int and 0 <= position < 1 << 63
        is_seq = seq is None or (type(seq) is int and 0 <= seq < 1 << 32)
        is_moment = moment is None or type(moment) is int
        if not all(type(text) is str for text in texts) or not (is_number and is_seq and is_moment):
            raise InvalidOffset("A field of a MySQL position is missing or of another kind.", next_step=_NEXT_STEP)
        gtids: Gtids | None = None if gtid_set is None else MySqlGtids.parse(gtid_set)
        if gtid_pos is not None:
            gtids = MariaDbGtids.parse(gtid_pos)
        assert type(filename) is str
        assert type(position) is int
        if gtids is None:
            place_in_file(filename, position)
        return cls(filename, position, gtids, server, seq, moment)


@dataclass(frozen=True, slots=True)
class MySqlMark(PositionMark[MySqlOffset]):
    """What a snapshot at one place contains."""

    kind: ClassVar[str] = "MySql"
    offset_type: ClassVar[type[CdcOffset]] = MySqlOffset

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        places = position_rows(positions, POSITION_DTYPE)["place"].astype(np.uint64)
        contained: NDArray[np.bool_] = places < np.uint64(self.at.place)
        return contained


def base_of(filename: str) -> str:
    """The name of a binlog file without its number."""
    return filename.rpartition(".")[0]


def place_in_file(filename: str, position: int) -> int:
    """The place of a byte of a binlog file.

    :raises InvalidOffset: the name has no number, or the number or the position is larger than servers have.
    """
    number = filename.rpartition(".")[2]
    if not (number.isascii() and number.isdigit()) or int(number) >> 31 or position >> (31 + _GRAIN_BITS):
        raise InvalidOffset(
            "A binlog position has a file name without a number, or a number that no server has.",
            next_step="Give one like binlog.000007 and 659.",
        )
    return int(number) << _FILE_BITS | _STEP * ((position >> _GRAIN_BITS) + 1)


def positions_of(place: NDArray[np.uint64], seq: NDArray[np.uint32]) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of rows."""
    made = np.zeros(len(place), POSITION_DTYPE)
    made["place"], made["seq"] = place, seq
    return pa.Array.from_buffers(POSITION_TYPE, len(made), [None, pa.py_buffer(made)])
