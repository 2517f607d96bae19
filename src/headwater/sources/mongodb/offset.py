"""MongoOffset: a place in the commit order of a replica set or a sharded cluster.

The order is that of the cluster time alone: seconds and a counter, one number of 64 bits. All changes of a transaction
have one cluster time, and so may those that are written at once without one; a replica set gives no two of them the
same. The resume token is what the server wants to be told to go on: it is opaque, kept beside the time, and never
compared.

=========================  ========================  ======================================================
place                      rank                      meaning
=========================  ========================  ======================================================
row *n* of a transaction   ``(time, n)``             the transaction at *time* is half way
between transactions       ``(time, 2**32)``         all changes up to *time*, and those at it, lie before it
=========================  ========================  ======================================================

The JSON form::

    {"MongoDb": {"ordinal": 4, "seconds": 1794848883, "token": "826AFB3873000000042B0429296E1404"}}

and ``events`` beside them: by database, the token of its last event. Earlier releases kept ``event``, the last of all.

Shards commit their parts of one transaction one after the other, each at a time of its own log, and readers see all of
them from one moment on, the first of these times or before it. A row's position has both where the server tells it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import InvalidOffset
from headwater.sources.offset import CdcOffset, position_rows
from headwater.sources.snapshots import PositionMark

POSITION_TYPE: Final = pa.binary(16)
"""``_position``: cluster time (8 bytes), number in the transaction (4), how long before readers saw it (4, mostly 0:
:func:`seen_codes`); big endian, so bytes sort as commits."""

POSITION_DTYPE: Final = np.dtype([("time", ">u8"), ("seq", ">u4"), ("seen", ">u4")])
_POSITION: Final = struct.Struct("!QII")
_END: Final = (1 << 32) - 1
_NEXT_STEP: Final = "Give the text that to_json() wrote."
_ORDINAL_BITS: Final = 20
_MOST_SECONDS: Final = (1 << 12) - 2
UNKNOWN: Final = ""
"""Instead of a database, in :attr:`MongoOffset.events`: of which one the event is, was not kept."""
_TOKEN_TIME: Final = 0x82
"""What the first byte of a token is; the cluster time follows, big endian."""


@dataclass(frozen=True, slots=True, eq=False)
class MongoOffset(CdcOffset):
    """One place.

    :ivar time: the cluster time: seconds in the high 32 bits, the counter in the low ones.
    :ivar token: what the server is told to go on after this place (:func:`token_text`); empty where only the time is
        known.
    :ivar seq: the number in the transaction; ``None`` where the place is between transactions.
    :ivar moment: when the server was seen to be here, in microseconds since 1970; not part of the order.
    :ivar events: by database: the token of its last event that was told before this place or at it. A server that does
        not have it is not the one that was followed (:func:`.watch.require_events`).
    """

    kind: ClassVar[str] = "MongoDb"

    time: int
    token: str = ""
    seq: int | None = None
    moment: int | None = None
    events: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_token(cls, token: str) -> MongoOffset:
        """The place just before the time that *token* names, which is what a person may give to start at.

        :raises InvalidOffset: it is no resume token of a server that we know.
        """
        time = token_time(token)
        if time is None or not time:
            raise InvalidOffset(
                "The text is no resume token of MongoDB.",
                next_step="Give what _data holds in the _id of an event of a change stream: hexadecimal digits.",
            )
        return cls(time - 1, token)

    @property
    def is_boundary(self) -> bool:
        """Whether no transaction is half way here."""
        return self.seq is None

    @property
    def newest(self) -> str:
        """The database of the newest of :attr:`events`; :data:`UNKNOWN` where there is none, too."""
        return max(self.events, key=lambda space: token_time(self.events[space]) or 0, default=UNKNOWN)

    def rank(self) -> tuple[int, ...]:
        return self.time, _END + 1 if self.seq is None else self.seq

    def position_after(self, last: bytes | None) -> bytes:
        if last is None:
            return _POSITION.pack(self.time, _END, 0)
        if len(last) != _POSITION.size:
            raise InvalidOffset(f"Received a position of {len(last)} bytes; valid are {_POSITION.size}.")
        time, seq, _ = _POSITION.unpack(last)
        return _POSITION.pack(time, seq, _END)

    def to_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"seconds": self.time >> 32, "ordinal": self.time & _END}
        if self.token:
            fields["token"] = self.token
        if self.seq is not None:
            fields["seq"] = self.seq
        if self.moment is not None:
            fields["moment"] = self.moment
        if self.events:
            fields["events"] = dict(self.events)
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MongoOffset:
        seconds, ordinal = fields.get("seconds"), fields.get("ordinal")
        token, seq, moment = fields.get("token", ""), fields.get("seq"), fields.get("moment")
        events = fields.get("events", {UNKNOWN: fields["event"]} if "event" in fields else {})
        are_numbers = all(
            type(number) is int and 0 <= number <= _END for number in (seconds, ordinal, 0 if seq is None else seq)
        )
        are_tokens = type(events) is dict and all(type(one) is str for one in (token, *events, *events.values()))
        if not are_numbers or not are_tokens or type(moment) not in (int, type(None)):
            raise InvalidOffset("A field of a MongoDB position is missing or of another kind.", next_step=_NEXT_STEP)
        assert type(seconds) is int
        assert type(ordinal) is int
        return cls(seconds << 32 | ordinal, token, seq, moment, events)


@dataclass(frozen=True, slots=True)
class MongoMark(PositionMark[MongoOffset]):
    """What a snapshot at one cluster time contains: everything up to it.

    Anybody who reads at that time (``readConcern: snapshot``, ``atClusterTime``) sees the same documents, on any
    machine, for as long as the server keeps them: no transaction is held open and nothing is undone.

    Shards write a transaction over several of them into their logs when readers have seen it for a moment. A snapshot
    may have been taken in that moment: then changes that it has come after it in the log, up to *until*.

    :ivar until: no change after this place is in it; ``None``: none after *at*.
    """

    kind: ClassVar[str] = "MongoDb"
    offset_type: ClassVar[type[CdcOffset]] = MongoOffset

    until: MongoOffset | None = None

    @property
    def high(self) -> MongoOffset:
        return self.until or self.at

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        contained: NDArray[np.bool_] = seen_times(position_rows(positions, POSITION_DTYPE)) <= np.uint64(self.at.time)
        return contained

    def to_fields(self) -> dict[str, Any]:
        fields = {"at": self.at.to_fields()}
        return fields if self.until is None else fields | {"until": self.until.to_fields()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MongoMark:
        until = fields.get("until")
        return cls(cls._position(fields.get("at")), None if until is None else cls._position(until))


def token_text(token: Mapping[str, Any]) -> str:
    """A resume token as one text: its data, and after a colon its type bits where it has them."""
    bits = token.get("_typeBits")
    return f"{token['_data']}:{bytes(bits).hex()}" if bits else str(token["_data"])


def token_document(text: str) -> dict[str, Any]:
    """What :func:`token_text` made a text of, for the server. :raises InvalidOffset: it is none."""
    data, _, bits = text.partition(":")
    try:
        return {"_data": data, "_typeBits": bytes.fromhex(bits)} if bits else {"_data": data}
    except ValueError:
        raise InvalidOffset("The text is no resume token of MongoDB.", next_step=_NEXT_STEP) from None


def token_time(token: str) -> int | None:
    """The cluster time that a resume token begins with; ``None`` where it is of a form that we do not know.

    Nothing is made of it but a time: a place that no event tells can be had in no other way.
    """
    try:
        start = bytes.fromhex(token[:18])
    except ValueError:
        return None
    if len(start) != 9 or start[0] != _TOKEN_TIME:
        return None
    return int.from_bytes(start[1:], "big")


def is_same_event(one: str, other: str) -> bool:
    """Whether two tokens are of one event. That of a part of it begins as that of the whole, but for the last byte."""
    shorter, longer = sorted((one.partition(":")[0], other.partition(":")[0]), key=len)
    return longer.startswith(shorter[:-2])


def seen_codes(time: NDArray[np.uint64], commit: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """For changes at *time* of the log that readers see since *commit*: the last four bytes of their positions.

    Seconds between the two (12 bits) and the counter of *commit* (20 bits). 0: since *time* itself, or since a moment
    that lies too far before it to be written.
    """
    seconds = (time >> np.uint64(32)).astype(np.int64) - (commit >> np.uint64(32)).astype(np.int64)
    ordinal = (commit & np.uint64(_END)).astype(np.int64)
    fits = (commit < time) & (seconds <= _MOST_SECONDS) & (ordinal < 1 << _ORDINAL_BITS)
    return np.where(fits, (seconds << _ORDINAL_BITS) | ordinal, 0).astype(np.uint32)


def seen_times(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """The cluster times since which readers see the changes at these positions (:data:`POSITION_DTYPE`)."""
    time, code = rows["time"].astype(np.uint64), rows["seen"].astype(np.uint64)
    bits = np.uint64(_ORDINAL_BITS)
    seconds = (time >> np.uint64(32)) - (code >> bits)
    early = seconds << np.uint64(32) | code & np.uint64((1 << _ORDINAL_BITS) - 1)
    return np.where(code == 0, time, early)


def positions_of(
    time: NDArray[np.uint64], seq: NDArray[np.uint32], seen: NDArray[np.uint32] | None = None
) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of rows; *seen*: their :func:`seen_codes`."""
    made = np.zeros(len(time), POSITION_DTYPE)
    made["time"], made["seq"] = time, seq
    if seen is not None:
        made["seen"] = seen
    return pa.Array.from_buffers(POSITION_TYPE, len(made), [None, pa.py_buffer(made)])
