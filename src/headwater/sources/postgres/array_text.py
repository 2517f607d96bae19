"""Array text: Postgres's ``{1,NULL,"a,b"}`` as lists of texts.

Compiled where it was built. The Python way goes row by row, and is slow: it is there so that nothing is missing.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.postgres.decoder import is_compiled

if TYPE_CHECKING:
    pass

_ELEMENT: Final = re.compile(r'(?:"((?:[^"\\]|\\.)*)"|([^"\\{},]+))(,|\Z)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


class ArrayState(IntEnum):
    """What a value turned out to be. A null is fine, and has no elements."""

    FINE = 0
    SPECIAL = 1  # several dimensions, or lower bounds
    MALFORMED = 2


def split_arrays(text: pa.StringArray) -> tuple[pa.Int32Array, NDArray[np.int8], pa.StringArray]:
    """Where each value's elements begin, what each value is (:class:`ArrayState`), and the elements of all.

    A value that is not fine has no elements. Offsets are one more than values.
    """
    return _split_compiled(text) if is_compiled() else _split_python(text)


def _split_compiled(text: pa.StringArray) -> tuple[pa.Int32Array, NDArray[np.int8], pa.StringArray]:
    from headwater.sources.postgres import _decoder

    rows = len(text)
    _, places, data = text.buffers()
    valid = pc.is_valid(text).to_numpy(zero_copy_only=False)
    first = memoryview(places)[text.offset * 4 :] if rows else bytes(4)
    lists, states, count, elements, offsets, validity, nulls = _decoder.split_arrays(
        first, b"" if data is None else data, valid, rows
    )
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(elements)]
    return (
        pa.Array.from_buffers(pa.int32(), rows + 1, [None, pa.py_buffer(lists)]),
        np.frombuffer(states, np.int8),
        pa.Array.from_buffers(pa.string(), count, buffers, nulls),
    )


def _split_python(text: pa.StringArray) -> tuple[pa.Int32Array, NDArray[np.int8], pa.StringArray]:
    offsets, states, elements = [0], [], list[str | None]()
    for value in text.to_pylist():
        found = [] if value is None else _elements(value)
        states.append(found if isinstance(found, ArrayState) else ArrayState.FINE)
        if not isinstance(found, ArrayState):
            elements += found
        offsets.append(len(elements))
    return pa.array(offsets, pa.int32()), np.array(states, np.int8), pa.array(elements, pa.string())


def _elements(value: str) -> list[str | None] | ArrayState:
    if value.startswith("["):
        return ArrayState.SPECIAL
    if len(value) < 2 or value[0] != "{" or value[-1] != "}":
        return ArrayState.MALFORMED
    if value[1] == "{":
        return ArrayState.SPECIAL
    body, at = value[1:-1], 0
    elements: list[str | None] = []
    while body:
        element = _ELEMENT.match(body, at)
        if element is None:
            return ArrayState.MALFORMED
        quoted, plain, comma = element.groups()
        if quoted is not None:
            elements.append(_ESCAPED.sub(r"\1", quoted))
        else:
            elements.append(None if plain == "NULL" else plain)
        at = element.end()
        if not comma:
            break
    return elements
