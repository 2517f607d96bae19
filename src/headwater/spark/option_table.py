"""The options of a format as one table: the fields of a dataclass, each with a name, a reader of its text, and help.

Spark gives options as texts, under names in any case. One that is empty is not given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeAlias

from headwater.backfill.errors import InvalidQuery
from headwater.spark.errors import InvalidOption

Read: TypeAlias = Callable[[str, str], Any]
"""The value for the name and the text of an option. :raises InvalidOption: the text is not valid."""


def option(name: str, read: Read, meaning: str, default: Any = None, *, is_secret: bool = False) -> Any:
    """A field of a dataclass that is the option *name*. :param meaning: for people."""
    return field(default=default, repr=not is_secret, metadata={"option": name, "read": read, "meaning": meaning})


def meanings(kind: type[Any]) -> dict[str, str]:
    """The options of *kind*, in their order, and what they mean."""
    return {one.metadata["option"]: one.metadata["meaning"] for one in fields(kind) if one.metadata}


def read_options(kind: type[Any], given: Mapping[str, str], of: str = "", more: str = "") -> dict[str, Any]:
    """The values of the options that are *given*, by the names of their fields in *kind*.

    :param of: whose options they are, for errors. :param more: that are valid as well, for errors.
    :raises InvalidOption: an unknown option, or a value that is not valid.
    """
    known = {one.metadata["option"].lower(): one for one in fields(kind) if one.metadata}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() not in known:
            names = list(meanings(kind))
            near = difflib.get_close_matches(name.lower(), known, 1, 0.0)
            raise InvalidOption(
                f"There is no option {name!r}{of}.",
                next_step=f"Did you mean {known[near[0]].metadata['option']!r}? Valid are {', '.join(names)}{more}.",
            )
        one, text = known[name.lower()], str(value).strip()
        if text:
            try:
                values[one.name] = one.metadata["read"](one.metadata["option"], text)
            except InvalidQuery as error:
                raise InvalidOption(error.message, next_step=error.next_step) from None
    return values


# -- readers -----------------------------------------------------------------------------------------------------------


def text_of(_: str, text: str) -> str:
    return text


def location_of(_: str, text: str) -> str:
    return absolute(text)


def absolute(location: str) -> str:
    """A path that means the same in every process; a URL as it is."""
    return location if not location or "://" in location else str(Path(location).expanduser().absolute())


def word(*valid: str) -> Read:
    """One of *valid*, in any case."""

    def read(name: str, text: str) -> str:
        if text.lower() not in valid:
            raise InvalidOption(f"Received {name}={text!r}.", next_step=f"Valid are {' and '.join(valid)}.")
        return text.lower()

    return read


def flag(name: str, text: str) -> bool:
    return bool(word("true", "false")(name, text) == "true")


def number(least: int, most: int | None = None) -> Read:
    """A whole number from *least* on."""

    def read(name: str, text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            upto = "" if most is None else f" to {most}"
            raise InvalidOption(f"Received {name}={text!r}.", next_step=f"Valid are whole numbers from {least}{upto}.")
        return int(text)

    return read


def names_of(name: str, text: str) -> tuple[str, ...]:
    """Names by commas; one in double quotes may have commas, and two of them for each of its own."""
    if not re.fullmatch(r'\s*("([^"]|"")+"|[^",]+)(,\s*("([^"]|"")+"\s*|[^",]+))*', text):
        raise InvalidOption(f"Option {name!r} is no list of names by commas.", next_step="Write id, name.")
    matches = re.findall(r'\s*(?:"((?:[^"]|"")+)"\s*|([^",]+))(?:,|$)', text)
    return tuple(quoted.replace('""', '"') if quoted else plain.strip() for quoted, plain in matches)
