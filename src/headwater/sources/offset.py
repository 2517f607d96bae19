"""CdcOffset: a place in a source's log, ordered as the source commits.

Each kind of source has its own class; the JSON form is a tagged union, one key that names the kind::

    {"Postgres": {"lsn": 29973608, "lsn_commit": 29973600, "seq": 4294967295, "txid": 1046}}

Places of one kind are ordered in commit order. Two kinds have no order: comparing them is an error, never an answer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import total_ordering
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import ForeignOffset, InvalidOffset

_MODULES: Final = {
    "Citus": "headwater.sources.citus.offset",
    "MongoDb": "headwater.sources.mongodb.offset",
    "MySql": "headwater.sources.mysql.offset",
    "Postgres": "headwater.sources.postgres.offset",
    "SqlServer": "headwater.sources.sqlserver.offset",
    "Written": "headwater.sources.written",
}
_NEXT_STEP: Final = "Give the text that to_json() wrote."


@total_ordering
class CdcOffset(ABC):
    """A place in the log of one kind of source.

    ``==`` holds where the places are the same in the order; places of two kinds are never equal.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """The key of the JSON form."""
    _kinds: ClassVar[dict[str, type[CdcOffset]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        CdcOffset._kinds[cls.kind] = cls

    @abstractmethod
    def rank(self) -> tuple[int, ...]:
        """What the order compares."""

    @abstractmethod
    def to_fields(self) -> dict[str, Any]:
        """What JSON keeps beneath the kind."""

    @classmethod
    @abstractmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CdcOffset:
        """:raises InvalidOffset: a field is missing or no place in a log."""

    @abstractmethod
    def position_after(self, last: bytes | None) -> bytes:
        """A ``_position`` after that of the change *last* and before every later one; ``None``: at this place."""

    def has_passed(self, other: CdcOffset) -> bool:
        """Whether all that lies before *other* lies before this place, too.

        :raises ForeignOffset: *other* is a place in another kind of source's log.
        """
        return self >= other

    def joined(self, other: CdcOffset) -> CdcOffset:
        """The first place that has passed both this one and *other*.

        :raises ForeignOffset: *other* is a place in another kind of source's log.
        """
        return max(self, other)

    def is_behind(self, other: CdcOffset) -> bool:
        """Whether something lies before *other* and after this place.

        :raises ForeignOffset: *other* is a place in another kind of source's log.
        """
        return self < other

    def to_json(self) -> str:
        """One line with sorted keys, so that equal places give equal text."""
        return json.dumps({self.kind: self.to_fields()}, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> CdcOffset:
        """The place that :meth:`to_json` wrote, of any kind, by this release or an earlier one.

        :raises InvalidOffset: the text is not such a place.
        """
        try:
            read = json.loads(text)
        except ValueError as error:
            raise InvalidOffset("The text is no position: it is not JSON.", next_step=_NEXT_STEP) from error
        if not isinstance(read, dict) or len(read) != 1:
            raise InvalidOffset("The text is no position: it must be an object with one key.", next_step=_NEXT_STEP)
        ((kind, fields),) = read.items()
        if kind in _MODULES:
            import_module(_MODULES[kind])
        if kind not in CdcOffset._kinds or not isinstance(fields, dict):
            known = ", ".join(sorted(_MODULES.keys() | CdcOffset._kinds))
            raise InvalidOffset(f"Received a position of kind {kind!r}; valid are {known}.", next_step=_NEXT_STEP)
        return CdcOffset._kinds[kind].from_fields(fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CdcOffset) or other.kind != self.kind:
            return NotImplemented
        return self.rank() == other.rank()

    def __hash__(self) -> int:
        return hash((self.kind, self.rank()))

    def __lt__(self, other: object) -> bool:
        """:raises ForeignOffset: *other* is a place in another kind of source's log."""
        if not isinstance(other, CdcOffset) or other.kind != self.kind:
            found = other.kind if isinstance(other, CdcOffset) else type(other).__name__
            raise ForeignOffset(
                f"A position of {self.kind} was compared with one of {found}: they have no order.",
                next_step="Compare positions of one source only.",
            )
        return self.rank() < other.rank()


def position_rows(positions: pa.FixedSizeBinaryArray, dtype: np.dtype[Any]) -> NDArray[np.void]:
    """A ``_position`` column by the fields of *dtype*, over the same memory."""
    data = positions.buffers()[1]
    if data is None or not len(positions):
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, len(positions), positions.offset * dtype.itemsize)
