"""Where keys lie between cuts, digit by digit. Pure.

Every column becomes *digits*: numbers that are ordered as its values. Keys and cuts are compared digit by digit: after
each digit, a key is known by the place that it has among the cuts so far, so no number grows large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.splits import Cut

Digits: TypeAlias = list[tuple[NDArray[Any], NDArray[Any]]]
"""Of the keys and of the cuts, most significant first."""


class DigitOrder(ABC):
    """The order of one table's keys; see :class:`~headwater.sources.snapshots.KeyOrder`."""

    __slots__ = ()

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        """For each row of key columns, in key order: how many of the ascending *cuts* lie before it.

        :raises SourceUnreachable: the database had to be asked and did not answer.
        """
        if not cuts or not keys.num_rows:
            return np.zeros(keys.num_rows, np.int64)
        after = np.fromiter((cut.after for cut in cuts), np.bool_, len(cuts))
        known = np.fromiter((len(cut.values) for cut in cuts), np.int64, len(cuts))
        key_codes, cut_codes = np.zeros(keys.num_rows, np.int64), np.zeros(len(cuts), np.int64)
        for place in range(keys.num_columns):
            has = known > place
            if not has.any():
                break
            texts = [cut.values[place] for cut in cuts if len(cut.values) > place]
            for of_keys, of_cuts in self._digits(place, keys.column(place), texts):
                key_codes, cut_codes = _next(key_codes, cut_codes, of_keys, of_cuts, has, after)
        places: NDArray[np.int64] = np.searchsorted(cut_codes * 3 + 2 * after, key_codes * 3 + 1).astype(np.int64)
        return places

    @abstractmethod
    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        """Of the column at *place*: its values, and the texts that cuts have for it."""


def ranked_together(
    keys: pa.StringArray, cuts: pa.StringArray, rank: Callable[[pa.StringArray], NDArray[np.int64]]
) -> Digits:
    """One digit: the ranks that the database gives the distinct values of *keys* and *cuts*."""
    distinct = pc.unique(pa.concat_arrays([keys, cuts]))
    ranks = pa.array(rank(distinct))
    of_keys, of_cuts = (ranks.take(pc.index_in(values, distinct)).to_numpy() for values in (keys, cuts))
    return [(of_keys, of_cuts)]


def byte_ranks(keys: pa.Array, cuts: pa.Array) -> Digits:
    """Texts or bytes in the order of their bytes."""
    both = pa.concat_arrays([keys.cast(pa.binary()), cuts.cast(pa.binary())])
    ranks = pc.rank(both, sort_keys="ascending", tiebreaker="dense").to_numpy().astype(np.int64)
    return [(ranks[: len(keys)], ranks[len(keys) :])]


def numbers(array: pa.Array) -> list[NDArray[Any]]:
    """Numbers, dates and times as whole numbers in their order; decimals take several."""
    kind = array.type
    if pa.types.is_decimal(kind):
        words = kind.bit_width // 64
        raw = np.frombuffer(array.buffers()[1], "<u8")[array.offset * words : (array.offset + len(array)) * words]
        parts = raw.reshape(-1, words)
        return [parts[:, words - 1].view(np.int64), *(parts[:, word] for word in range(words - 2, -1, -1))]
    if pa.types.is_floating(kind):
        values = array.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0
        bits = values.view(np.int64)
        ordered = bits ^ ((bits >> 63) & np.int64(0x7FFF_FFFF_FFFF_FFFF))
        return [np.where(np.isnan(values), np.int64(0x7FFF_FFFF_FFFF_FFFF), ordered)]
    if pa.types.is_date32(kind):
        array = array.cast(pa.int32())
    whole = pa.uint64() if pa.types.is_uint64(kind) else pa.int64()
    return [array.cast(whole).to_numpy(zero_copy_only=False)]


def _next(
    key_codes: NDArray[np.int64],
    cut_codes: NDArray[np.int64],
    of_keys: NDArray[Any],
    of_cuts: NDArray[Any],
    has: NDArray[np.bool_],
    after: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places of keys and cuts after one more digit; cuts that do not have it lie before or after all values."""
    steps, keys = _placed(of_keys, of_cuts)
    width = 2 * len(steps) + 4
    own = np.where(after, width - 1, 0)
    own[has] = 2 * np.searchsorted(steps, of_cuts) + 2
    cut_codes = cut_codes * width + own
    steps, keys = _placed(key_codes * width + keys + 1, cut_codes)
    return keys, 2 * np.searchsorted(steps, cut_codes) + 1


def _placed(values: NDArray[Any], steps: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The distinct *steps*, and for each value: 2n + 1 where it is the n-th step, 2n where it is just before it."""
    distinct = np.unique(steps)
    place = np.searchsorted(distinct, values)
    equal = distinct[np.minimum(place, len(distinct) - 1)] == values
    return distinct, (2 * place + equal).astype(np.int64)
