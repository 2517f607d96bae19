"""The key hash: 64-bit words folded into one state per row, whole blocks of rows at a time.

The definition, byte for byte, is docs/formats/vnode.md; it is a durable format and never changes for a
vnode that is already written. This module knows numpy arrays only: which words a value has is told by
:mod:`headwater.stream.key_column`.

Everything works in place on arrays of at most :data:`BLOCK` rows, so the state, the words and the
scratch space of a block stay in the processor's cache. A state is always a contiguous native uint64 array.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

BLOCK: Final = 8192
"""Rows per block: three arrays of 64 KiB."""

PIECE: Final = 1024
"""Longer byte strings are replaced by the digests of their pieces, so a long key is no long loop."""

# The first 64 fractional bits of the square roots of 2, 3, 5, 7 and 11; multipliers are made odd.
SEED: Final = np.uint64(0xA54FF53A5F1D36F1)
NULL: Final = np.uint64(0x510E527FADE682D1)
LENGTH: Final = np.uint64(0x3C6EF372FE94F82B)
_MULTIPLIER_1: Final = np.uint64(0x6A09E667F3BCC909)
_MULTIPLIER_2: Final = np.uint64(0xBB67AE8584CAA73B)
_SHIFT_29: Final = np.uint64(29)
_SHIFT_32: Final = np.uint64(32)

# Keeps the lowest 0…8 bytes of a word.
_TAIL_MASKS: Final = np.array([(1 << 8 * kept) - 1 for kept in range(9)], dtype=np.uint64)


def mix(state: U64, scratch: U64) -> None:
    """Scramble every word of *state* in place; a bijection of 64-bit words."""
    np.right_shift(state, _SHIFT_32, out=scratch)
    np.bitwise_xor(state, scratch, out=state)
    np.multiply(state, _MULTIPLIER_1, out=state)
    np.right_shift(state, _SHIFT_29, out=scratch)
    np.bitwise_xor(state, scratch, out=state)
    np.multiply(state, _MULTIPLIER_2, out=state)
    np.right_shift(state, _SHIFT_32, out=scratch)
    np.bitwise_xor(state, scratch, out=state)


def fold(state: U64, words: U64 | np.uint64, scratch: U64) -> None:
    """Take one word per row into *state*."""
    np.bitwise_xor(state, words, out=state)
    mix(state, scratch)


def fold_length(state: U64, lengths: I64 | int) -> None:
    """Take the length of a value that has more than one word, or any byte string, into *state*."""
    # At least one dimension: products of scalars warn when they wrap, products of arrays do not.
    state += LENGTH * np.atleast_1d(lengths).astype(np.uint64)


class ByteWords:
    """The 8-byte little-endian words of a buffer at any byte position, without copying the buffer.

    A word that reaches over the end of the buffer has zeros there: no byte outside is ever read.
    """

    __slots__ = ("_last", "_words")

    def __init__(self, data: NDArray[np.uint8]) -> None:
        if data.size < 8:
            data = np.concatenate([data, np.zeros(8 - data.size, dtype=np.uint8)])
        self._last = data.size - 8
        self._words: U64 = np.ndarray((data.size - 7,), dtype="<u8", buffer=data, strides=(1,))

    def all_inside(self, positions: I64) -> bool:
        """Whether the words at *positions* end before the buffer does."""
        return bool(positions.max(initial=0) <= self._last)

    def at(self, positions: I64) -> U64:
        """The words at *positions*, all of which are inside."""
        return self._words[positions].astype(np.uint64, copy=False)

    def at_edge(self, positions: I64) -> U64:
        """The words at *positions*, any of which may reach over the end."""
        over = np.clip(positions - self._last, 0, 8).astype(np.uint64)
        words = self.at(np.minimum(positions, self._last))
        # A shift by 64 is undefined: two shifts of at most 32.
        half = over * np.uint64(4)
        words >>= half
        words >>= half
        return words


def fold_bytes(state: U64, data: NDArray[np.uint8], starts: I64, lengths: I64) -> None:
    """Take one byte string per row into *state*: ``data[start : start + length]`` of each row."""
    fold_length(state, lengths)
    _fold_byte_words(state, data, starts, lengths)


def _fold_byte_words(state: U64, data: NDArray[np.uint8], starts: I64, lengths: I64) -> None:
    is_long = lengths > PIECE
    if not is_long.any():
        _fold_short(state, ByteWords(data), starts, lengths)
        return
    rows = np.flatnonzero(is_long)
    digests, firsts, sizes = _digest_pieces(data, starts[rows], lengths[rows])
    inner = state[rows]
    _fold_byte_words(inner, digests, firsts, sizes)
    state[rows] = inner
    rows = np.flatnonzero(~is_long)
    if rows.size:
        inner = state[rows]
        _fold_short(inner, ByteWords(data), starts[rows], lengths[rows])
        state[rows] = inner


def _digest_pieces(data: NDArray[np.uint8], starts: I64, lengths: I64) -> tuple[NDArray[np.uint8], I64, I64]:
    """The digests of the pieces of all rows as bytes, and where each row's digests start and how long they are."""
    counts = (lengths + (PIECE - 1)) // PIECE
    firsts = np.cumsum(counts) - counts
    total = int(counts.sum())
    before = (np.arange(total, dtype=np.int64) - np.repeat(firsts, counts)) * PIECE
    piece_starts = np.repeat(starts, counts) + before
    piece_lengths = np.minimum(np.repeat(lengths, counts) - before, PIECE)
    digests = np.full(total, SEED, dtype=np.uint64)
    for start in range(0, total, BLOCK):
        block = slice(start, start + BLOCK)
        fold_bytes(digests[block], data, piece_starts[block], piece_lengths[block])
    return digests.astype("<u8", copy=False).view(np.uint8), firsts * 8, counts * 8


def _fold_short(state: U64, words: ByteWords, starts: I64, lengths: I64) -> None:
    """Byte strings of at most :data:`PIECE` bytes: at most 128 steps, whatever the number of rows."""
    if not state.size:
        return
    counts = np.maximum((lengths + 7) >> 3, 1)
    fewest, most = int(counts.min()), int(counts.max())
    if fewest == most:
        _fold_prefixes(state, words, starts.copy(), lengths.copy(), [state.size] * most, fewest)
        return
    # Rows with more words come first: those that still have a word are then a prefix, a view and not a copy.
    order = np.argsort((most - counts).astype(np.uint8), kind="stable")
    with_words = np.cumsum(np.bincount(counts)[::-1])[::-1][1:]
    inner = state[order]
    _fold_prefixes(inner, words, starts[order], lengths[order], with_words.tolist(), fewest)
    state[order] = inner


def _fold_prefixes(state: U64, words: ByteWords, positions: I64, left: I64, prefixes: list[int], fewest: int) -> None:
    scratch = np.empty_like(state)
    inside = words.all_inside(positions + np.maximum(left - 1, 0) // 8 * 8)
    for step, rows in enumerate(prefixes):
        at = positions[:rows]
        word = words.at(at) if inside else words.at_edge(at)
        if step >= fewest - 1:
            np.bitwise_and(word, _TAIL_MASKS[np.minimum(left[:rows], 8)], out=word)
        fold(state[:rows], word, scratch[:rows])
        positions[:rows] += 8
        left[:rows] -= 8
