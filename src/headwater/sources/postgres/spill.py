"""Transactions that the server streams before their commit: kept by xid until it is known whether they commit.

The server sends a large transaction in blocks while it still runs, and blocks of several such transactions alternate.
Their raw messages wait here: first in memory, and beyond a bound in one append-only file per transaction. A commit
replays them in order, an abort drops the transaction or leaves out what a rolled-back savepoint did.

Nothing here outlives the process: after a crash the server sends every unfinished transaction from its beginning, so
the files that are found at opening are removed. They are never synced, and are readable for their owner alone.

A file is a sequence of blocks: ``count u32 | body length u64 | crc32 u32 | count × message length u32 | body``, little
endian, the CRC over lengths and body.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Final, Self

from headwater.sources.errors import SourceBusy, SourceClosed, SourceError, SourceProtocolError, SpillFull
from headwater.system.files import make_root

_BLOCK: Final = struct.Struct("<IQI")
_SUFFIX: Final = ".spill"
_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))

_TYPE: Final = 25  # of a raw message: where its pgoutput message begins
_SUBXID: Final = slice(26, 30)
_ORIGIN: Final = ord("O")  # the one kind without a sub-transaction


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """What the store holds now.

    :ivar transactions: unfinished transactions.
    :ivar spilled: those of them that have a file.
    :ivar messages: messages of all of them.
    :ivar bytes: bytes of these messages, in memory and on disk.
    :ivar bytes_in_memory: of these, what is not in a file.
    :ivar bytes_on_disk: size of the files.
    """

    transactions: int
    spilled: int
    messages: int
    bytes: int
    bytes_in_memory: int
    bytes_on_disk: int


@dataclass(slots=True)
class _Transaction:
    path: Path
    held: list[bytes] = field(default_factory=list)
    held_bytes: int = 0
    messages: int = 0
    message_bytes: int = 0
    file_bytes: int = 0
    undone: set[bytes] = field(default_factory=set)


class SpillStore:
    """The unfinished transactions of one stream.

    :param directory: for the files, of this store alone; made when missing, emptied of what a crash left.
    :param max_bytes: bound on the size of all files.
    :param held_per_transaction: bytes of a transaction in memory before they go to its file.
    :param held_in_all: bytes of all transactions in memory.
    :raises SourceBusy: another process uses the directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        held_per_transaction: int = 4 << 20,
        held_in_all: int = 64 << 20,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._held_per_transaction = held_per_transaction
        self._held_in_all = held_in_all
        self._held_bytes = 0
        self._file_bytes = 0
        self._transactions: dict[int, _Transaction] = {}
        self._lock = _locked(directory)
        for left in directory.glob("*" + _SUFFIX):
            left.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, xid: int, messages: list[bytes]) -> None:
        """Add the messages of a block of transaction *xid*; a block without messages makes the transaction known.

        What was there goes to disk if both together are too much for memory, so memory holds the bounds and one block.

        :raises SpillFull: no room; the messages were not added and all others are as they were.
        """
        self._check_open()
        transaction = self._transactions.get(xid)
        if transaction is None:
            transaction = self._transactions[xid] = _Transaction(self._directory / f"{xid}{_SUFFIX}")
        size = sum(map(len, messages))
        if transaction.held and transaction.held_bytes + size > self._held_per_transaction:
            self._flush(transaction)
        while self._held_bytes and self._held_bytes + size > self._held_in_all:
            self._flush(max(self._transactions.values(), key=lambda one: one.held_bytes))
        transaction.held += messages
        transaction.held_bytes += size
        transaction.messages += len(messages)
        transaction.message_bytes += size
        self._held_bytes += size

    def abort(self, xid: int, subxid: int) -> None:
        """Forget transaction *xid*, or of it what its sub-transaction *subxid* did; an unknown one is none of ours.

        That includes the tables that it described: the server describes them again for what follows.
        """
        self._check_open()
        if xid == subxid:
            self.drop(xid)
        elif (transaction := self._transactions.get(xid)) is not None:
            transaction.undone.add(subxid.to_bytes(4, "big"))

    def replay(self, xid: int) -> Iterator[list[bytes]]:
        """The messages of transaction *xid* that were not undone, in order, a block at a time; they stay until dropped.

        :raises SourceProtocolError: no block of it came, or its file is not as it was written.
        """
        self._check_open()
        transaction = self._transactions.get(xid)
        if transaction is None:
            raise SourceProtocolError(f"The server committed transaction {xid}, of which it had streamed nothing.")
        undone = transaction.undone
        for block in self._blocks(transaction):
            if undone:
                block = [one for one in block if one[_SUBXID] not in undone or one[_TYPE] == _ORIGIN]
            if block:
                yield block

    def drop(self, xid: int) -> None:
        """Forget transaction *xid*; an unknown one is none of ours."""
        transaction = self._transactions.pop(xid, None)
        if transaction is not None:
            self._held_bytes -= transaction.held_bytes
            self._file_bytes -= transaction.file_bytes
            if transaction.file_bytes:
                transaction.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget all transactions: the stream starts again and will send them from their beginning."""
        for xid in list(self._transactions):
            self.drop(xid)

    def statistics(self) -> SpillStatistics:
        held = self._transactions.values()
        return SpillStatistics(
            transactions=len(held),
            spilled=sum(one.file_bytes > 0 for one in held),
            messages=sum(one.messages for one in held),
            bytes=sum(one.message_bytes for one in held),
            bytes_in_memory=self._held_bytes,
            bytes_on_disk=self._file_bytes,
        )

    def close(self) -> None:
        """Remove the files and let the directory go. Closing twice is fine."""
        if self._lock >= 0:
            self.clear()
            os.close(self._lock)
            self._lock = -1

    def _flush(self, transaction: _Transaction) -> None:
        block = _encoded(transaction.held)
        if self._max_bytes is not None and self._file_bytes + len(block) > self._max_bytes:
            raise SpillFull(
                f"Transactions that the server streams before their commit take more than {self._max_bytes} bytes"
                f" in {self._directory}.",
                next_step="Raise the limit of the spilled bytes, or end the large transaction at the source.",
            )
        try:
            _append(transaction.path, transaction.file_bytes, block)
        except OSError as error:
            raise _disk_error(self._directory, error) from error
        transaction.file_bytes += len(block)
        self._file_bytes += len(block)
        self._held_bytes -= transaction.held_bytes
        transaction.held = []
        transaction.held_bytes = 0

    def _blocks(self, transaction: _Transaction) -> Iterator[list[bytes]]:
        if transaction.file_bytes:
            try:
                with transaction.path.open("rb") as file:
                    while file.tell() < transaction.file_bytes:
                        yield _decoded(file, transaction.file_bytes)
            except OSError as error:
                raise _disk_error(self._directory, error) from error
        yield transaction.held

    def _check_open(self) -> None:
        if self._lock < 0:
            raise SourceClosed("The store of streamed transactions is closed.")


def _disk_error(directory: Path, error: OSError) -> SourceError:
    if error.errno in _NO_ROOM:
        return SpillFull(
            f"There is no room in {directory} for a transaction that the server streams before its commit.",
            next_step="Free some space there, or name a directory on a larger disk.",
        )
    return SourceError(
        f"A file of {directory} cannot be used: {error.strerror}.",
        next_step="Check the disk, and the owner and mode of the directory.",
    )


def _locked(directory: Path) -> int:
    try:
        make_root(directory)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _disk_error(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise SourceBusy(
            f"Another process keeps its streamed transactions in {directory}.",
            next_step="Stop it, or name another directory.",
        ) from error
    return lock


def _append(path: Path, end: int, block: bytes) -> None:
    """Write *block* at *end* of the file; if that fails the file is as long as before."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        rest, at = memoryview(block), end
        while rest:
            written = os.pwrite(file, rest, at)
            rest, at = rest[written:], at + written
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file, end)
        raise
    finally:
        os.close(file)


def _encoded(messages: list[bytes]) -> bytes:
    lengths = array.array("I", map(len, messages)).tobytes()
    body = b"".join(messages)
    return b"".join((_BLOCK.pack(len(messages), len(body), zlib.crc32(body, zlib.crc32(lengths))), lengths, body))


def _decoded(file: BinaryIO, end: int) -> list[bytes]:
    header = file.read(_BLOCK.size)
    if len(header) == _BLOCK.size:
        count, length, crc = _BLOCK.unpack(header)
        if file.tell() + 4 * count + length <= end:
            lengths, body = file.read(4 * count), file.read(length)
            if zlib.crc32(body, zlib.crc32(lengths)) == crc:
                ends = accumulate(array.array("I", lengths), initial=0)
                return [body[start:stop] for start, stop in pairwise(ends)]
    raise SourceProtocolError(
        "A file of spilled changes is not as it was written.",
        next_step="Check the disk and start again: the server sends the transaction once more.",
    )
