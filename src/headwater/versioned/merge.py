"""Merge: several sorted sources of pieces as one, block by block: of the rows of a key the newest counts.

In each round the rows up to the lowest last position of all blocks at hand are taken from each source. A block that no
other source has anything to say about goes through as it is, and its positions are never computed. What is in memory is
one block of each source.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from headwater.versioned.key_positions import positions
from headwater.versioned.net_rows import Piece, merge
from headwater.versioned.run_file import RunReader


class BlockHead:
    """A block of a run at the head of a source, with its first and last position; read when it is needed."""

    def __init__(self, run: RunReader, block: int, wanted: pa.Schema, keys: Sequence[str]) -> None:
        self._run, self._block, self._wanted, self._keys = run, block, wanted, keys
        self.first, self.last = run.firsts[block], run.lasts[block]

    def rows(self) -> pa.RecordBatch:
        return self._run.read(self._block, self._wanted)

    def piece(self) -> Piece:
        rows = self.rows()
        return Piece(rows, positions(rows, self._keys))


class PieceHead:
    """A piece in memory."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.first, self.last = piece.positions[0].as_py(), piece.positions[-1].as_py()

    def piece(self) -> Piece:
        return self._piece


def run_heads(
    run: RunReader, low: bytes, high: bytes, wanted: pa.Schema, keys: Sequence[str]
) -> Iterator[BlockHead | PieceHead]:
    """The blocks of *run* in ``[low, high)``; those at its ends are cut."""
    for block in run.blocks(low, high):
        head = BlockHead(run, block, wanted, keys)
        if head.first >= low and head.last < high:
            yield head
            continue
        piece = between(head.piece(), low, high)
        if len(piece):
            yield PieceHead(piece)


def piece_heads(piece: Piece, rows: int = 65536) -> Iterator[PieceHead]:
    """A piece in blocks."""
    for start in range(0, len(piece), rows):
        yield PieceHead(piece.slice(start, min(start + rows, len(piece))))


def between(piece: Piece, low: bytes, high: bytes) -> Piece:
    """The rows in ``[low, high)``."""
    return piece.slice(place_of(piece.positions, low), place_of(piece.positions, high))


def place_of(places: pa.BinaryArray, position: bytes) -> int:
    """How many of the sorted *places* come before *position*."""
    return bisect_left(range(len(places)), position, key=lambda place: places[place].as_py())


def merged(sources: Sequence[Iterable[BlockHead | PieceHead]]) -> Iterator[pa.RecordBatch | Piece]:
    """The sources, the oldest first, as one. A block that nobody else speaks of comes as rows, the rest as pieces."""
    streams = [iter(source) for source in sources]
    heads = [next(stream, None) for stream in streams]
    while True:
        live = [place for place, head in enumerate(heads) if head is not None]
        if not live:
            return
        lead = min(live, key=lambda place: _head(heads, place).last)
        bound = _head(heads, lead).last
        others = [place for place in live if place != lead and _head(heads, place).first <= bound]
        head = _head(heads, lead)
        if not others:
            yield head.rows() if isinstance(head, BlockHead) else head.piece()
        else:
            taken: list[Piece] = []
            for place in sorted([lead, *others]):
                piece = _head(heads, place).piece()
                if place == lead:
                    taken.append(piece)
                    continue
                count = place_of(piece.positions, bound + b"\x00")
                taken.append(piece.slice(0, count))
                left = piece.slice(count, len(piece))
                heads[place] = PieceHead(left) if len(left) else next(streams[place], None)
            yield merge(taken)
        heads[lead] = next(streams[lead], None)


def _head(heads: Sequence[BlockHead | PieceHead | None], place: int) -> BlockHead | PieceHead:
    head = heads[place]
    assert head is not None
    return head
