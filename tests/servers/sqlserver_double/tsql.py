"""T-SQL, as far as our statements and our tests use it, as SQLite's. Pure.

It is no parser of T-SQL: it takes statements apart into words, and replaces those that SQLite writes in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_WORD: Final = re.compile(
    r"""N?'(?:[^']|'')*'|\[(?:[^\]]|\]\])*\]|"(?:[^"]|"")*"|0x[0-9A-Fa-f]*|@@?\w+|[A-Za-z_][\w$]*
    |\d+\.?\d*(?:[eE][+-]?\d+)?|<>|<=|>=|!=|\S""",
    re.VERBOSE,
)


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def statements_of(batch: str) -> Iterator[list[str]]:
    """The statements of a batch, as words: they end with a semicolon."""
    made: list[str] = []
    for word in words_of(batch):
        if word == ";":
            if made:
                yield made
            made = []
        else:
            made.append(word)
    if made:
        yield made


def name_of(word: str) -> str:
    """A name without its brackets or quotes."""
    if word.startswith("["):
        return word[1:-1].replace("]]", "]")
    return word[1:-1].replace('""', '"') if word.startswith('"') else word


def text_of(word: str) -> str:
    """The text of a literal."""
    return word.removeprefix("N")[1:-1].replace("''", "'")


def closing(words: Sequence[str], begin: int) -> int:
    """Where the parenthesis at *begin* closes."""
    depth = 0
    for place in range(begin, len(words)):
        depth += {"(": 1, ")": -1}.get(words[place], 0)
        if not depth:
            return place
    raise ValueError("a parenthesis is open")


def split_at_commas(words: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += {"(": 1, ")": -1}.get(word, 0)
        if word == "," and not depth:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def to_sqlite(words: Sequence[str], table: Callable[[str, str], str | None]) -> str:
    """One statement. :param table: what a table of a schema is called there; ``None``: it is none."""
    return " ".join(_Rewrite(words, table).made())


@dataclass
class _Rewrite:
    words: Sequence[str]
    table: Callable[[str, str], str | None]

    def made(self) -> list[str]:
        words, limit = list(self.words), ""
        upper = [word.upper() for word in words]
        if upper[:2] == ["SELECT", "TOP"]:
            end = closing(words, 2)
            limit = "LIMIT " + " ".join(words[3:end])
            words = [words[0], *words[end + 1 :]]
            upper = [word.upper() for word in words]
        if "OFFSET" in upper and "FETCH" in upper:
            at = upper.index("OFFSET")
            limit = f"LIMIT {words[at + 5]} OFFSET {words[at + 1]}"
            words = words[:at]
        made = self._rewritten(words)
        return [*made, limit] if limit else made

    def _rewritten(self, words: Sequence[str]) -> list[str]:
        made: list[str] = []
        place = 0
        while place < len(words):
            word, upper = words[place], words[place].upper()
            following = words[place + 1] if place + 1 < len(words) else ""
            if upper in ("CONVERT", "TRY_CONVERT") and following == "(":
                end = closing(words, place + 1)
                kind, *rest = split_at_commas(words[place + 2 : end])
                inner = ", ".join(" ".join(self._rewritten(part)) for part in rest)
                made.append(f"{upper}_('{''.join(kind)}', {inner})")
                place = end + 1
            elif upper in ("DATEDIFF", "DATEDIFF_BIG", "DATEPART") and following == "(":
                end = closing(words, place + 1)
                unit, *rest = split_at_commas(words[place + 2 : end])
                inner = ", ".join(" ".join(self._rewritten(part)) for part in rest)
                made.append(f"{'DATEPART_' if upper == 'DATEPART' else 'DATEDIFF_'}('{unit[0]}', {inner})")
                place = end + 1
            elif upper == "COLLATE":
                place += 2
            elif word == "." and words[place + 1 : place + 4] == ["ToString", "(", ")"]:
                place += 4
            elif following == "." and place + 2 < len(words) and (found := self._table(word, words[place + 2])):
                made.append(found)
                place += 3
            else:
                made.append(_literal(word))
                place += 1
        return made

    def _table(self, schema: str, name: str) -> str | None:
        found = self.table(name_of(schema), name_of(name))
        return None if found is None else f'"{found}"'


def _literal(word: str) -> str:
    if word.startswith("N'"):
        return word[1:]
    if word.startswith("0x"):
        return f"X'{word[2:]}'"
    if word.startswith("["):
        return '"' + name_of(word).replace('"', '""') + '"'
    return word
