"""RawRows: rows as the server sent them: columns of text, and what each row carries beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import SourceProtocolError


@dataclass(frozen=True, slots=True, eq=False)
class RawColumn:
    """The values of one column.

    :ivar text: the server's text (Arrow ``string``); null is SQL's null, or not known.
    :ivar unchanged: which values the server left out because they are unchanged; ``None`` where there are none.
    """

    text: pa.StringArray
    unchanged: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class RawRows:
    """Rows of one relation in the order of the stream.

    :ivar ops: int8, :class:`~headwater.stream.Op` codes.
    :ivar commit_lsn: uint64.
    :ivar seq: uint32, number in the transaction.
    :ivar xid: uint32.
    :ivar commit_time: int64, microseconds since 1970 UTC.
    """

    oid: int
    ops: NDArray[np.int8]
    commit_lsn: NDArray[np.uint64]
    seq: NDArray[np.uint32]
    xid: NDArray[np.uint32]
    commit_time: NDArray[np.int64]
    columns: list[RawColumn]

    def __len__(self) -> int:
        return len(self.ops)

    def up_to(self, end: int) -> RawRows:
        """The first *end* rows."""
        columns = [
            RawColumn(one.text.slice(0, end), None if one.unchanged is None else one.unchanged[:end])
            for one in self.columns
        ]
        return RawRows(
            self.oid,
            self.ops[:end],
            self.commit_lsn[:end],
            self.seq[:end],
            self.xid[:end],
            self.commit_time[:end],
            columns,
        )


def utf8_of(values: Any) -> pa.StringArray:
    """*values* (binary or string) as text.

    :raises SourceProtocolError: a value is no UTF-8.
    """
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SourceProtocolError(
            "The server sent text that is not UTF-8.",
            next_step="A database of encoding SQL_ASCII must be converted to UTF8 first.",
        ) from error
