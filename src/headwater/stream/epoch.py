"""Epoch: the version number of everything.

An epoch is an unsigned 64-bit number. The high 48 bits are milliseconds since :data:`ORIGIN`
(2021-04-01T00:00:00Z); the low 16 bits are zero in every epoch that leaves its writer. Epochs of one
log are strictly increasing, so the order of epochs is the order of what happened, and the number itself
says when. ``0`` is :data:`INVALID`: "no epoch yet".

:class:`Epoch` is an ``int``, so it packs, compares and travels in JSON as one. Its multiples of 65536 stay
exact even where a JSON reader holds numbers as doubles. Arithmetic gives plain ``int``: only the
constructors make epochs, and they check.

The wall clock is passed in. It may stand still or go back; :class:`EpochClock` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self, SupportsIndex

from headwater.stream.errors import EpochError

ORIGIN = datetime(2021, 4, 1, tzinfo=UTC)
"""The instant of millisecond 0."""

ORIGIN_UNIX_MS = 1_617_235_200_000
PHYSICAL_SHIFT = 16
MAX_MS = (1 << 48) - 1

_STEP = 1 << PHYSICAL_SHIFT
_MILLISECOND = timedelta(milliseconds=1)


class Epoch(int):
    """One epoch.

    :raises EpochError: the number is negative, wider than 64 bits, or has low bits set.
    """

    __slots__ = ()

    def __new__(cls, value: SupportsIndex) -> Self:
        number = value.__index__()
        if not 0 <= number < 1 << 64:
            raise EpochError(
                f"Received epoch {number}; an epoch is an unsigned 64-bit number.",
                value=number,
                next_step="Make epochs from a clock with EpochClock or Epoch.from_unix_ms().",
            )
        if number & (_STEP - 1):
            raise EpochError(
                f"Received epoch {number}, whose low {PHYSICAL_SHIFT} bits are not zero.",
                value=number,
                next_step="Did you pass milliseconds? Use Epoch.from_ms() or Epoch.from_unix_ms() for those.",
            )
        return super().__new__(cls, number)

    @classmethod
    def from_ms(cls, ms: int) -> Self:
        """The epoch *ms* milliseconds after :data:`ORIGIN`.

        :raises EpochError: before the origin, or more than 48 bits.
        """
        if not 0 <= ms <= MAX_MS:
            raise EpochError(
                f"Received {ms} ms since {ORIGIN:%Y-%m-%d}; valid values are 0 to {MAX_MS}.",
                value=ms,
                next_step="Check the clock of this machine.",
            )
        return cls(ms << PHYSICAL_SHIFT)

    @classmethod
    def from_unix_ms(cls, unix_ms: int) -> Self:
        """The epoch of a wall clock that counts milliseconds since 1970.

        :raises EpochError: the time is before :data:`ORIGIN`.
        """
        return cls.from_ms(unix_ms - ORIGIN_UNIX_MS)

    @classmethod
    def from_datetime(cls, instant: datetime) -> Self:
        """The epoch at *instant*, rounded down to the millisecond.

        :raises EpochError: *instant* has no time zone, or is before :data:`ORIGIN`.
        """
        if instant.utcoffset() is None:
            raise EpochError(
                "Received a time without a time zone.",
                value=0,
                next_step="Give the datetime a tzinfo, for example datetime.UTC.",
            )
        return cls.from_ms((instant - ORIGIN) // _MILLISECOND)

    @property
    def ms(self) -> int:
        """Milliseconds since :data:`ORIGIN`."""
        return int(self) >> PHYSICAL_SHIFT

    @property
    def unix_ms(self) -> int:
        """Milliseconds since 1970-01-01Z."""
        return self.ms + ORIGIN_UNIX_MS

    @property
    def is_valid(self) -> bool:
        """False for :data:`INVALID` only."""
        return int(self) != 0

    def to_datetime(self) -> datetime:
        """The instant in UTC.

        :raises EpochError: the instant is after the year 9999, which datetime cannot hold.
        """
        try:
            return ORIGIN + timedelta(milliseconds=self.ms)
        except OverflowError:
            raise EpochError(
                f"Epoch {int(self)} is after the year 9999.", value=int(self), next_step="Use Epoch.ms."
            ) from None

    def next(self, unix_ms: int | None = None) -> Self:
        """The following epoch: that of the wall clock, or one millisecond later than this one where the
        clock is not ahead of it (it stands still, went back, or was not given).

        :raises EpochError: the 48 bits are used up.
        """
        own = self.ms + 1
        return type(self).from_ms(own if unix_ms is None else max(own, unix_ms - ORIGIN_UNIX_MS))

    def prev(self) -> Self:
        """The largest epoch below this one.

        :raises EpochError: this is :data:`INVALID`.
        """
        return type(self).from_ms(self.ms - 1)

    def ms_since(self, earlier: Epoch) -> int:
        """The lag of *earlier* behind this epoch in milliseconds; negative if it is the later one."""
        return self.ms - earlier.ms

    def __repr__(self) -> str:
        return f"Epoch({int(self)})"

    __str__ = int.__repr__


INVALID = Epoch(0)
"""No epoch."""


@dataclass(frozen=True, slots=True)
class EpochPair:
    """What a barrier carries: it closes ``prev`` and opens ``curr``.

    :raises EpochError: ``curr`` is not after ``prev``.
    """

    curr: Epoch
    prev: Epoch

    def __post_init__(self) -> None:
        # Plain numbers are welcome: they are checked here, once.
        object.__setattr__(self, "curr", Epoch(self.curr))
        object.__setattr__(self, "prev", Epoch(self.prev))
        if self.curr <= self.prev:
            raise EpochError(
                f"Received the pair curr={self.curr}, prev={self.prev}; curr must be after prev.",
                value=int(self.curr),
                next_step="Take the next epoch from EpochClock, which never goes back.",
            )

    def follows(self, other: EpochPair) -> bool:
        """Whether this pair is the successor of *other* in the chain: it closes what *other* opened."""
        return self.prev == other.curr

    def next(self, curr: Epoch) -> EpochPair:
        """The pair that closes this one's ``curr`` and opens *curr*.

        :raises EpochError: *curr* is not after this pair's ``curr``.
        """
        return EpochPair(curr=curr, prev=self.curr)

    @property
    def ms(self) -> int:
        """The length of the closed interval in milliseconds."""
        return self.curr.ms_since(self.prev)


class EpochClock:
    """Gives strictly increasing epochs from a wall clock that may go back.

    One owner, one thread: the process that injects the barriers of a log.

    :param now_ms: the wall clock, milliseconds since 1970.
    :param last: the newest epoch that is already used, for example the committed one after a restart.
    """

    __slots__ = ("_last", "_now_ms")

    def __init__(self, now_ms: Callable[[], int], last: Epoch = INVALID) -> None:
        self._now_ms = now_ms
        self._last = last

    @property
    def last(self) -> Epoch:
        """The newest epoch that was given out, or where the clock started."""
        return self._last

    def next(self) -> Epoch:
        """A new epoch, after all earlier ones.

        :raises EpochError: the wall clock is before :data:`ORIGIN` and no epoch was given yet,
            or the 48 bits are used up.
        """
        now = self._now_ms()
        self._last = self._last.next(now) if self._last.is_valid else Epoch.from_unix_ms(now)
        return self._last

    def next_pair(self) -> EpochPair:
        """A new epoch as ``curr``, with the one before as ``prev``."""
        prev = self._last
        return EpochPair(curr=self.next(), prev=prev)
