"""OptionTexts: options as Spark gives them, texts by names in any case, read as words and numbers; what is wrong with
one is said with what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from headwater.spark.errors import InvalidOption


class OptionTexts:
    """The options that are *given*, of which only *names* are known.

    :param of: whose options they are, for errors. :param more: that are valid as well, for errors.
    :raises InvalidOption: an option that is not known.
    """

    def __init__(self, given: Mapping[str, str], names: Sequence[str], of: str = "", more: str = "") -> None:
        known = {name.lower(): name for name in names}
        self._given: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() not in known:
                near = difflib.get_close_matches(name.lower(), known, 1, 0.0)
                raise InvalidOption(
                    f"There is no option {name!r}{of}.",
                    next_step=f"Did you mean {known[near[0]]!r}? Valid are {', '.join(names)}{more}.",
                )
            self._given[known[name.lower()]] = str(value).strip()

    def _flag(self, name: str, otherwise: bool) -> bool:
        return self._word(name, *("true", "false") if otherwise else ("false", "true")) == "true"

    def _word(self, name: str, *valid: str) -> str:
        """The first of *valid* when nothing is given."""
        value = self._given.get(name, valid[0]).lower()
        if value not in valid:
            raise InvalidOption(f"Received {name}={value!r}.", next_step=f"Valid are {' and '.join(valid)}.")
        return value

    def _number(self, name: str, least: int) -> int | None:
        text = self._given.get(name)
        if not text:
            return None
        if not text.isdecimal() or int(text) < least:
            raise InvalidOption(f"Received {name}={text!r}.", next_step=f"Valid are whole numbers from {least}.")
        return int(text)
