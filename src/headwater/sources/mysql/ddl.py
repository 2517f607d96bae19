"""What a statement of the log does to tables: only as much as the rows that follow do not tell themselves. Pure.

Row events tell names and types of columns, so a statement is asked for what they cannot tell: that a column was renamed
rather than dropped and added, that a table was emptied, dropped, or is called otherwise now. Anything else
is no effect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headwater.sources.mysql.names import TableName

ANSI_QUOTES: Final = 4
"""The bit of the SQL mode with which double quotes stand around names."""


@dataclass(frozen=True, slots=True)
class Altered:
    """Columns of a table changed. :ivar renamed: old and new names. :ivar dropped: names, as they were."""

    table: TableName
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Emptied:
    """All rows of a table were removed at once."""

    table: TableName


@dataclass(frozen=True, slots=True)
class Dropped:
    """A table is gone, or was made anew. :ivar table: an empty name: all tables of the database."""

    table: TableName


@dataclass(frozen=True, slots=True)
class Renamed:
    """Tables have other names; the pairs happened together, in their order."""

    pairs: tuple[tuple[TableName, TableName], ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Rows came or went without being told. :ivar how: in the words of the statement."""

    table: TableName
    how: str


Effect: TypeAlias = Altered | Emptied | Dropped | Renamed | Moved

_TOKEN: Final = re.compile(
    r"""
    (?P<blank>\s+|--[\s].*?(?:\n|$)|\#.*?(?:\n|$)|/\*(?![!M]).*?\*/|/\*M?!\d*|\*/)
  | (?P<name>`(?:[^`]|``)*`)
  | (?P<double>"(?:[^"\\]|\\.|"")*")
  | (?P<text>'(?:[^'\\]|\\.|'')*')
  | (?P<word>[\w$\x80-\U0010ffff@]+)
  | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_DML: Final = frozenset(("INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "MERGE"))
_NO_COLUMN: Final = frozenset(
    (
        *("INDEX", "KEY", "UNIQUE", "PRIMARY", "CONSTRAINT", "FOREIGN", "FULLTEXT", "SPATIAL", "PARTITION", "CHECK"),
        *("SYSTEM", "PERIOD", "VECTOR"),
    )
)
_UNTOLD: Final = {
    ("TRUNCATE", "PARTITION"): "a partition was truncated",
    ("DROP", "PARTITION"): "a partition was dropped",
    ("EXCHANGE", "PARTITION"): "a partition was exchanged",
    ("CONVERT", "PARTITION"): "a partition became a table",
    ("CONVERT", "TABLE"): "a table became a partition",
    ("IMPORT", "TABLESPACE"): "its tablespace was imported",
    ("DISCARD", "TABLESPACE"): "its tablespace was discarded",
}


@dataclass(frozen=True, slots=True)
class _Token:
    """:ivar kind: ``name`` (quoted), ``word``, ``text`` or ``sign``."""

    kind: str
    text: str

    @property
    def word(self) -> str:
        """In capitals where it is a word that is not quoted."""
        return self.text.upper() if self.kind == "word" else ""


def effects(sql: str, database: str, *, ansi_quotes: bool = False) -> list[Effect]:
    """What *sql*, run in *database*, does to tables; nothing where it is no such statement."""
    read = _Reader(_tokens(sql, ansi_quotes), database)
    read.skip_settings()
    first = read.word()
    if first == "ALTER":
        return _alter(read)
    if first == "RENAME" and read.word() in ("TABLE", "TABLES"):
        read.skip("IF", "EXISTS")
        return _rename(read)
    if first == "TRUNCATE":
        read.skip("TABLE")
        return [Emptied(read.table())]
    if first == "DELETE" and read.skip("FROM"):  # how a server logs that it lost a table in memory
        table = read.table()
        return [Emptied(table)] if read.is_over else []
    if first == "DROP":
        return _drop(read)
    if first == "CREATE":
        return _create(read)
    return []


def is_row_statement(sql: str) -> bool:
    """Whether *sql* changes rows: with row-based logging no such statement is in the log."""
    first = re.match(r"(?:\s|/\*.*?\*/|\()*([A-Za-z]+)", sql, re.DOTALL)
    if first is not None and first[1].upper() == "SET":
        read = _Reader(_tokens(sql, False), "")
        return read.skip_settings() and read.word() in _DML
    return first is not None and first[1].upper() in _DML


def words_of(sql: str) -> set[str]:
    """The names and words of a statement, in lower case."""
    return {token.text.lower() for token in _tokens(sql, False) if token.kind in ("name", "word")}


def _tokens(sql: str, ansi_quotes: bool) -> list[_Token]:
    made = []
    for found in _TOKEN.finditer(sql):
        kind, text = str(found.lastgroup), found[0]
        if kind == "blank":
            continue
        if kind == "name":
            text = text[1:-1].replace("``", "`")
        elif kind == "double":
            kind, text = ("name" if ansi_quotes else "text"), text[1:-1].replace('""', '"')
        made.append(_Token(kind, text))
    return made


class _Reader:
    """Reads tokens from front to back."""

    def __init__(self, tokens: Sequence[_Token], database: str) -> None:
        self._tokens, self._place, self._database = tokens, 0, database

    def peek(self, ahead: int = 0) -> _Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else _Token("sign", "")

    def next(self) -> _Token:
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

    def table(self) -> TableName:
        first = self.next().text
        if self.peek().text == "." and self.peek().kind == "sign":
            self.next()
            return TableName(first, self.next().text)
        return TableName(self._database, first)

    @property
    def is_over(self) -> bool:
        return self._place >= len(self._tokens)

    def has(self, *words: str) -> bool:
        """Whether one of these is among what is left."""
        return any(token.word in words for token in self._tokens[self._place :])

    def clause(self) -> list[_Token]:
        """The tokens up to the next comma that stands in no parentheses."""
        made: list[_Token] = []
        depth = 0
        while not self.is_over:
            token = self.next()
            if token.kind == "sign":
                if token.text == "," and not depth:
                    break
                depth += (token.text == "(") - (token.text == ")")
            made.append(token)
        return made


def _alter(read: _Reader) -> list[Effect]:
    ignores = False
    while read.peek().word in ("ONLINE", "OFFLINE", "IGNORE"):
        ignores |= read.word() == "IGNORE"
    if not read.skip("TABLE"):
        return []
    read.skip("IF", "EXISTS")
    table = read.table()
    if read.skip("WAIT"):
        read.next()
    read.skip("NOWAIT")
    renamed: list[tuple[str, str]] = []
    dropped: list[str] = []
    other: list[Effect] = []
    while not read.is_over:
        clause = _Reader(read.clause(), table.namespace)
        first, second = clause.peek().word, clause.peek(1).word
        if (first, second) in _UNTOLD:
            other.append(Moved(table, _UNTOLD[first, second]))
        elif ignores and first in ("ADD", "MODIFY", "CHANGE") and clause.has("UNIQUE", "PRIMARY"):
            other.append(Moved(table, "rows that have the same key were removed"))
        elif first == "RENAME" and second == "COLUMN":
            clause.skip("RENAME", "COLUMN")
            clause.skip("IF", "EXISTS")
            old = clause.next().text
            clause.skip("TO")
            renamed.append((old, clause.next().text))
        elif first == "RENAME" and second not in ("INDEX", "KEY"):
            clause.next()
            if not (clause.skip("TO") or clause.skip("AS")) and clause.peek().text == "=":
                clause.next()
            other.append(Renamed(((table, clause.table()),)))
        elif first == "CHANGE":
            clause.next()
            clause.skip("COLUMN")
            clause.skip("IF", "EXISTS")
            old, new = clause.next().text, clause.next().text
            if old != new:
                renamed.append((old, new))
        elif first == "DROP" and second not in _NO_COLUMN:
            clause.next()
            clause.skip("COLUMN")
            clause.skip("IF", "EXISTS")
            dropped.append(clause.next().text)
    changed: list[Effect] = [Altered(table, tuple(renamed), tuple(dropped))] if renamed or dropped else []
    return changed + other


def _rename(read: _Reader) -> list[Effect]:
    pairs = []
    while not read.is_over:
        old = read.table()
        if read.skip("WAIT"):
            read.next()
        read.skip("NOWAIT")
        if not read.skip("TO"):
            break
        pairs.append((old, read.table()))
        if read.next().text != ",":
            break
    return [Renamed(tuple(pairs))] if pairs else []


def _drop(read: _Reader) -> list[Effect]:
    kind = read.word()
    if kind in ("DATABASE", "SCHEMA"):
        read.skip("IF", "EXISTS")
        return [Dropped(TableName(read.next().text, ""))]
    if kind not in ("TABLE", "TABLES"):
        return []
    read.skip("IF", "EXISTS")
    made: list[Effect] = []
    while not read.is_over:
        made.append(Dropped(read.table()))
        if read.next().text != ",":
            break
    return made


def _create(read: _Reader) -> list[Effect]:
    replaces = read.skip("OR", "REPLACE")
    if not replaces or not read.skip("TABLE"):
        return []
    return [Dropped(read.table())]
