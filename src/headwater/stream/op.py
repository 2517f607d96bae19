"""Op: what happened to a row.

=================  ====  ======================  ==============================================
op                 code  ``_change_type``        meaning
=================  ====  ======================  ==============================================
``INSERT``         1     ``insert``              the row is new
``DELETE``         2     ``delete``              the row is gone; its columns are the old ones
``UPDATE_INSERT``  3     ``update_postimage``    the new row of an update
``UPDATE_DELETE``  4     ``update_preimage``     the old row of an update
=================  ====  ======================  ==============================================

An update pair is an ``UPDATE_DELETE`` immediately followed by its ``UPDATE_INSERT``: same key, same vnode,
same epoch. Where the source tells no old rows, an ``UPDATE_INSERT`` stands alone. The codes are durable (int8 in a
chunk). The delete half comes first although its code is the larger one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.stream.errors import ChunkError


class Op(IntEnum):
    """The op codes."""

    INSERT = 1
    DELETE = 2
    UPDATE_INSERT = 3
    UPDATE_DELETE = 4

    @property
    def change_type(self) -> str:
        """The name in the ``_change_type`` column."""
        return CHANGE_TYPES[self - 1]

    @property
    def adds(self) -> bool:
        """Whether the row exists afterwards."""
        return self in (Op.INSERT, Op.UPDATE_INSERT)


CHANGE_TYPES = ("insert", "delete", "update_postimage", "update_preimage")
"""The ``_change_type`` names in the order of the codes, from code 1."""
REREAD = "reread"
"""The ``_change_type`` of a row that is no change: it was read again, and is as an ``UPDATE_INSERT``."""

_VALID_NAMES = f"valid values are {', '.join(CHANGE_TYPES)}."
_NAME_STEP = "Rename the values, or leave the rows out."


def change_types_of(ops: Any) -> pa.DictionaryArray:
    """The ``_change_type`` column of the int8 *ops* of a chunk, dictionary-encoded."""
    codes = np.asarray(ops.to_numpy(zero_copy_only=False), dtype=np.int8) - 1
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(CHANGE_TYPES, pa.string()))


def ops_of(change_types: Any) -> pa.Int8Array:
    """The int8 ops of a ``_change_type`` column: the inverse of :func:`change_types_of`.

    :raises ChunkError: a null or unknown name; ``row`` is its index.
    """
    if pa.types.is_dictionary(change_types.type):
        change_types = change_types.dictionary_decode()
    names = change_types.cast(pa.string())
    names = pc.if_else(pc.equal(names, REREAD), Op.UPDATE_INSERT.change_type, names)
    places = pc.index_in(names, value_set=pa.array(CHANGE_TYPES, pa.string()))
    if places.null_count:
        row = int(np.flatnonzero(places.is_null().to_numpy(zero_copy_only=False))[0])
        raise ChunkError(f"Row {row} has another change type; {_VALID_NAMES}", row=row, next_step=_NAME_STEP)
    return pc.add(places, 1).cast(pa.int8())
