"""Cursor: reads an event from front to back; beyond its end it raises :class:`SourceProtocolError`."""

from __future__ import annotations

from headwater.sources.errors import SourceProtocolError


def protocol_error(reason: str) -> SourceProtocolError:
    """The error of bytes that are not what the format says."""
    return SourceProtocolError(
        f"The binlog is not what its format says: {reason}",
        next_step="Start the capture again; if it repeats, look at the file with mysqlbinlog --verify-binlog-checksum.",
    )


class Cursor:
    """Reads *data* from *place* to *end*; numbers are little-endian."""

    __slots__ = ("data", "end", "place")

    def __init__(self, data: bytes, place: int = 0, end: int | None = None) -> None:
        self.data, self.place, self.end = data, place, len(data) if end is None else end

    @property
    def left(self) -> int:
        return self.end - self.place

    def take(self, size: int) -> bytes:
        place, end = self.place, self.place + size
        if size < 0 or end > self.end:
            raise protocol_error("an event is cut off.")
        self.place = end
        return self.data[place:end]

    def skip(self, size: int) -> None:
        if size < 0 or self.place + size > self.end:
            raise protocol_error("an event is cut off.")
        self.place += size

    def number(self, size: int) -> int:
        """An unsigned number of *size* bytes."""
        return int.from_bytes(self.take(size), "little")

    def packed(self) -> int:
        """A number of one, three, four or nine bytes, as the client protocol has them."""
        first = self.number(1)
        if first < 0xFB:
            return first
        if first == 0xFC:
            return self.number(2)
        if first == 0xFD:
            return self.number(3)
        if first == 0xFE:
            return self.number(8)
        raise protocol_error("a length is none.")

    def variable(self) -> int:
        """A number of up to nine bytes whose first byte has as many low ones as bytes follow it."""
        first = self.number(1)
        following = (~first & 0xFF & -(~first & 0xFF)).bit_length() - 1 if first != 0xFF else 8
        return first >> (following + 1) | self.number(following) << (7 - following if following < 8 else 0)

    def rest(self) -> bytes:
        return self.take(self.left)

    def counted(self) -> bytes:
        """Bytes with their length in one byte before them."""
        return self.take(self.number(1))


def text_of(data: bytes) -> str:
    """Names in events are UTF-8.

    :raises SourceProtocolError: these are not.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise protocol_error("a name is no UTF-8.") from error
