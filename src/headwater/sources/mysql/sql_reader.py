"""Reads SQL statements of the log token by token. Pure.

Comments are skipped. What stands in executable comments (``/*! … */``, ``/*M! … */``) counts: the server ran it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headwater.sources.mysql.names import TableName

ANSI_QUOTES: Final = 4
"""The bit of the SQL mode with which double quotes stand around names."""
NO_BACKSLASH_ESCAPES: Final = 1 << 20
"""The bit of the SQL mode with which a backslash in a text means itself."""

_TOKEN: Final = re.compile(
    r"""
    (?P<blank>\s+|--(?=\s|$).*?(?:\n|$)|\#.*?(?:\n|$)|/\*(?!M?!).*?\*/|/\*M?!\d*|\*/)
  | (?P<name>`(?:[^`]|``)*`)
  | (?P<double>"(?:[^"\\]|\\.|"")*")
  | (?P<text>'(?:[^'\\]|\\.|'')*')
  | (?P<word>[\w$\x80-\U0010ffff@]+)
  | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """:ivar kind: ``name`` (quoted), ``word``, ``text`` or ``sign``."""

    kind: str
    text: str

    @property
    def word(self) -> str:
        """In capitals where it is a word that is not quoted."""
        return self.text.upper() if self.kind == "word" else ""


def words_of(sql: str, *, ansi_quotes: bool = False) -> set[str]:
    """The names and words of a statement, in lower case."""
    return {token.text.lower() for token in tokens_of(sql, ansi_quotes) if token.kind in ("name", "word")}


def tokens_of(sql: str, ansi_quotes: bool) -> list[Token]:
    """The tokens of a statement. :param ansi_quotes: double quotes stand around names."""
    made = []
    for found in _TOKEN.finditer(sql):
        kind, text = str(found.lastgroup), found[0]
        if kind == "blank":
            continue
        if kind == "name":
            text = text[1:-1].replace("``", "`")
        elif kind == "double":
            kind, text = ("name" if ansi_quotes else "text"), text[1:-1].replace('""', '"')
        elif kind == "text":
            text = text[1:-1].replace("''", "'")
        made.append(Token(kind, text))
    return made


class SqlReader:
    """Reads tokens from front to back."""

    def __init__(self, tokens: Sequence[Token], database: str) -> None:
        self._tokens, self._place, self._database = tokens, 0, database

    def peek(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else Token("sign", "")

    def next(self) -> Token:
        token = self.peek()
        self._place += 1
        return token

    def word(self) -> str:
        return self.next().word

    def skip(self, *words: str) -> bool:
        """Pass these words if they are next."""
        if any(self.peek(ahead).word != word for ahead, word in enumerate(words)):
            return False
        self._place += len(words)
        return True

    def skip_settings(self) -> bool:
        """Pass what MariaDB logs before a statement that was run with settings of its own."""
        if not self.skip("SET", "STATEMENT"):
            return False
        while not self.is_over and not self.skip("FOR"):
            self.next()
        return True

    def is_sign(self, text: str) -> bool:
        """Whether the sign *text* is next."""
        return self.peek() == Token("sign", text)

    def table(self) -> TableName:
        first = self.next().text
        if self.is_sign("."):
            self.next()
            return TableName(first, self.next().text)
        return TableName(self._database, first)

    @property
    def is_over(self) -> bool:
        return self._place >= len(self._tokens)

    def has(self, *words: str) -> bool:
        """Whether one of these is among what is left."""
        return any(token.word in words for token in self._tokens[self._place :])

    @property
    def left(self) -> list[tuple[str, str]]:
        """What is left, by kind and text."""
        return [(token.kind, token.text) for token in self._tokens[self._place :]]

    def clause(self) -> list[Token]:
        """The tokens up to the next comma that stands in no parentheses."""
        made: list[Token] = []
        depth = 0
        while not self.is_over:
            token = self.next()
            if token.kind == "sign":
                if token.text == "," and not depth:
                    break
                depth += (token.text == "(") - (token.text == ")")
            made.append(token)
        return made
