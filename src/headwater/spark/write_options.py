"""The options of ``writeStream.format("headwater")``, as Spark gives them: texts under names in any case.

====================  ==========================================================================================
option                meaning
====================  ==========================================================================================
``store``             where the log is kept: a directory or URL of its own, for one stream and one table
``table``             the name of the table: ``namespace.name``; a name alone is in ``public``
``key``               the columns that name a row, by commas; without it every row is a new one with a ``_row_id``
``vnodes``            how many vnodes a new log has; 256 by default
``query``             an id for the stream, where Spark tells none
``takeover``          ``true``: go on after what another stream, or another checkpoint, has written
====================  ==========================================================================================
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headwater.spark.errors import InvalidOption
from headwater.spark.options import absolute, names_of
from headwater.state.location import split_location
from headwater.stream import MAX_VNODE_COUNT

NAMES: Final = ("store", "table", "key", "vnodes", "query", "takeover")
_OF_SPARK: Final = frozenset(("checkpointlocation", "path", "queryname"))
_PART: Final = r'"(?:[^"]|"")+"|[^".]+'


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options, read and checked. They travel to tasks.

    :ivar key: empty: rows have none. :ivar vnodes: ``None``: as the log has it.
    """

    store: str
    namespace: str
    name: str
    key: tuple[str, ...] = ()
    vnodes: int | None = None
    query: str | None = None
    takeover: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> WriteOptions:
        """:raises InvalidOption: an option that there is not, a value that it cannot have, or one that is missing."""
        told = {name.lower(): str(value).strip() for name, value in given.items() if name.lower() not in _OF_SPARK}
        for name in told:
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, 1, 0.0)
                raise InvalidOption(
                    f"There is no option {name!r} for a stream that is written.",
                    next_step=f"Did you mean {near[0]!r}? Valid are {', '.join(NAMES)}.",
                )
        namespace, name = _table(told.get("table", ""))
        return cls(
            store=_store(told.get("store", "")),
            namespace=namespace,
            name=name,
            key=names_of("key", told.get("key", "")) or (),
            vnodes=_vnodes(told.get("vnodes", "")),
            query=told.get("query") or None,
            takeover=_flag("takeover", told.get("takeover", "")),
        )


def _store(text: str) -> str:
    if not text:
        raise InvalidOption("No store was named.", next_step="Set option 'store' to a directory of its own.")
    if split_location(text)[0] == "memory":
        raise InvalidOption(
            "A store in memory is seen by one process only.", next_step="Set option 'store' to a directory or a URL."
        )
    return absolute(text)


def _table(text: str) -> tuple[str, str]:
    """Namespace and name; a part in double quotes may have dots, and two quotes for each of its own."""
    if not text:
        raise InvalidOption("No table was named.", next_step="Set option 'table', for example to shop.totals.")
    if not re.fullmatch(rf"(?:{_PART})(?:\.(?:{_PART}))?", text):
        raise InvalidOption(
            f"Received table={text!r}.",
            next_step='Write namespace.name, each in double quotes if it has dots: a."b.c".',
        )
    parts = [
        part[1:-1].replace('""', '"') if part.startswith('"') else part.strip() for part in re.findall(_PART, text)
    ]
    return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])


def _vnodes(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_VNODE_COUNT:
        raise InvalidOption(f"Received vnodes={text!r}.", next_step=f"Valid are 1 to {MAX_VNODE_COUNT}.")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise InvalidOption(f"Received {name}={text!r}.", next_step="Valid are false and true.")
    return text.lower() == "true"
