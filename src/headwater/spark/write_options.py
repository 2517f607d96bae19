"""The options of ``writeStream.format("headwater")``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from headwater.spark.errors import InvalidOption
from headwater.spark.option_table import absolute, flag, names_of, number, option, read_options, text_of
from headwater.state.location import split_location
from headwater.stream import MAX_VNODE_COUNT

_OF_SPARK: Final = frozenset(("checkpointlocation", "path", "queryname"))
_PART: Final = r'"(?:[^"]|"")+"|[^".]+'


def _store(_: str, text: str) -> str:
    if split_location(text)[0] == "memory":
        raise InvalidOption(
            "A store in memory is seen by one process only.", next_step="Set option 'store' to a directory or a URL."
        )
    return absolute(text)


def _table(_: str, text: str) -> tuple[str, str]:
    """Namespace and name; a part in double quotes may have dots, and two quotes for each of its own."""
    if not re.fullmatch(rf"(?:{_PART})(?:\.(?:{_PART}))?", text):
        raise InvalidOption(
            f"Received table={text!r}.",
            next_step='Write namespace.name, each in double quotes if it has dots: a."b.c".',
        )
    parts = [
        part[1:-1].replace('""', '"') if part.startswith('"') else part.strip() for part in re.findall(_PART, text)
    ]
    return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options, read and checked. They travel to tasks.

    :ivar table: namespace and name. :ivar key: empty: rows have none. :ivar vnodes: ``None``: as the log has it.
    """

    store: str = option("store", _store, "Where the log is kept: its own directory or URL, for one stream.", "")
    table: tuple[str, str] = option("table", _table, "namespace.name; a name alone is in public.", ("", ""))
    key: tuple[str, ...] = option(
        "key", names_of, "Columns that name a row, by commas; without it every row is a new one with a _row_id.", ()
    )
    vnodes: int | None = option("vnodes", number(1, MAX_VNODE_COUNT), "Vnodes of a new log (default: 256).")
    query: str | None = option("query", text_of, "An id for the stream, where Spark has none.")
    takeover: bool = option(
        "takeover", flag, "true: continue after what another stream, or another checkpoint, has written.", False
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """:raises InvalidOption: an unknown option, a value that is not valid, or one that is missing."""
        own = {name: value for name, value in given.items() if name.lower() not in _OF_SPARK}
        options = cls(**read_options(cls, own, " for a stream that is written"))
        if not options.store:
            raise InvalidOption("No store was named.", next_step="Set option 'store' to a directory of its own.")
        if not options.name:
            raise InvalidOption("No table was named.", next_step="Set option 'table', for example to shop.totals.")
        return options

    @property
    def namespace(self) -> str:
        return self.table[0]

    @property
    def name(self) -> str:
        return self.table[1]
