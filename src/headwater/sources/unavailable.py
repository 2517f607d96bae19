"""The column ``_unavailable`` of a log: the names of the columns that the source did not tell. Pure.

A new row that a special value parks has there, after :data:`PARKED`, the name of each column with such a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
PARKED: Final = "_parked:"


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


def with_parked(unavailable: Any, masks: dict[str, Mask]) -> Any:
    """An ``_unavailable`` column that also says which rows are parked, and for which columns."""
    parked = unavailable_texts({f"{PARKED}{name}": mask for name, mask in masks.items()}, len(unavailable))
    if parked.null_count == len(parked):
        return unavailable
    return pc.coalesce(pc.binary_join_element_wise(unavailable, parked, ","), parked, unavailable)


def is_parked(unavailable: Any) -> Mask:
    """Which rows are parked."""
    found = pc.fill_null(pc.match_substring(unavailable, PARKED), False)
    mask: Mask = found.to_numpy(zero_copy_only=False)
    return mask


def parked_reason(unavailable: str) -> str:
    """Why a row is parked."""
    names = [repr(one.removeprefix(PARKED)) for one in unavailable.split(",") if one.startswith(PARKED)]
    columns = f"column {names[0]} holds a value" if len(names) == 1 else f"columns {', '.join(names)} hold values"
    return f"Special value: {columns} that the type does not have."
