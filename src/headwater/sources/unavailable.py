"""The column ``_unavailable`` of a log: the names of the columns that the source did not tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def names_column(unavailable: Any, name: str) -> Mask:
    """Where the texts of an ``_unavailable`` column name the column *name*."""
    if unavailable.null_count == len(unavailable):
        return np.zeros(len(unavailable), np.bool_)
    wrapped = pc.binary_join_element_wise("", unavailable, "", ",")
    found = pc.fill_null(pc.match_substring(wrapped, f",{name},"), False)
    whole = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    mask: Mask = whole.to_numpy(zero_copy_only=False)
    return mask


def unavailable_names(unavailable: Any, names: Sequence[str]) -> list[str]:
    """Those of *names* that occur in an ``_unavailable`` column."""
    told = pc.unique(unavailable.drop_null())
    if not len(told):
        return []
    occurring = set(pc.unique(pc.list_flatten(pc.split_pattern(told, ","))).to_pylist())
    return [name for name in names if name in occurring or ("," in name and names_column(told, name).any())]


def unavailable_texts(masks: dict[str, Mask], rows: int) -> Any:
    """The inverse of :func:`names_column`: a text with the names whose mask is set; null where none is."""
    if not any(mask.any() for mask in masks.values()):
        return pa.nulls(rows, pa.string())
    texts: Any = pa.repeat(pa.scalar(""), rows)
    for name, mask in masks.items():
        texts = pc.if_else(pa.array(mask), pc.binary_join_element_wise(texts, name, ","), texts)
    texts = pc.utf8_slice_codeunits(texts, 1)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
