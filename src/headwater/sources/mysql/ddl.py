"""What a statement of the log does to tables: only as much as the rows that follow do not tell themselves. Pure.

Row events tell names and types of columns, so a statement is asked for what they cannot tell: that a column was renamed
rather than dropped and added, what older rows have in an added column, that a definition changed and values perhaps
with it, that a table was emptied, dropped, or is called otherwise now. Anything else is no effect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from headwater.sources.mysql.column_clause import ColumnClause, charset_name, charset_of, parse_column
from headwater.sources.mysql.names import TableName

ANSI_QUOTES: Final = 4
"""The bit of the SQL mode with which double quotes stand around names."""
_ORACLE: Final = 1 << 9
_NO_BACKSLASH_ESCAPES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Altered:
    """Columns of a table changed.

    :ivar renamed: old and new names. :ivar dropped: names, as they were.
    :ivar modified: columns that were defined again, by the names that they had. :ivar added: new columns.
    :ivar key: the columns of the new primary key; empty where there is none any more; ``None``: as it was.
    :ivar charset: of new columns from now on. :ivar converts: columns that there were have it, too.
    """

    table: TableName
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    modified: tuple[tuple[str, ColumnClause], ...] = ()
    added: tuple[ColumnClause, ...] = ()
    key: tuple[str, ...] | None = None
    charset: str = ""
    converts: bool = False


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
_ORDERS: Final = frozenset(("ASC", "DESC", "USING", "BTREE", "HASH"))
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


def effects(sql: str, database: str, *, sql_mode: int = 0) -> list[Effect]:
    """What *sql*, run in *database*, does to tables; nothing where it is no such statement."""
    ansi_quotes = bool(sql_mode & ANSI_QUOTES)
    certain = not (sql_mode & _ORACLE or (sql_mode & _NO_BACKSLASH_ESCAPES and "\\" in sql))
    read = _Reader(_tokens(sql, ansi_quotes), database)
    read.skip_settings()
    first = read.word()
    if first == "ALTER":
        return _alter(read, certain)
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


def words_of(sql: str, *, ansi_quotes: bool = False) -> set[str]:
    """The names and words of a statement, in lower case."""
    return {token.text.lower() for token in _tokens(sql, ansi_quotes) if token.kind in ("name", "word")}


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
        elif kind == "text":
            text = text[1:-1].replace("''", "'")
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

    def key_columns(self) -> tuple[str, ...]:
        """The names in the parentheses that follow."""
        inside = self._tokens[next((n for n, token in enumerate(self._tokens) if token.text == "("), 0) :]
        return tuple(token.text for token in inside if token.kind in ("name", "word") and token.word not in _ORDERS)

    @property
    def left(self) -> list[tuple[str, str]]:
        """What is left, by kind and text."""
        return [(token.kind, token.text) for token in self._tokens[self._place :]]

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


def _alter(read: _Reader, certain: bool) -> list[Effect]:
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
    altered = Altered(table)
    other: list[Effect] = []
    while not read.is_over:
        clause = _Reader(read.clause(), table.namespace)
        first, second = clause.peek().word, clause.peek(1).word
        if (first, second) in _UNTOLD:
            other.append(Moved(table, _UNTOLD[first, second]))
        elif ignores and first in ("ADD", "MODIFY", "CHANGE") and clause.has("UNIQUE", "PRIMARY"):
            other.append(Moved(table, "rows that have the same key were removed"))
        elif first == "RENAME" and second not in ("INDEX", "KEY", "COLUMN"):
            clause.next()
            if not (clause.skip("TO") or clause.skip("AS")) and clause.peek().text == "=":
                clause.next()
            other.append(Renamed(((table, clause.table()),)))
        else:
            altered = _altered(altered, clause, certain)
    return ([] if altered == Altered(table) else [altered]) + other


def _altered(altered: Altered, clause: _Reader, certain: bool) -> Altered:
    """*altered* with one more clause of its statement."""
    first, second = clause.word(), clause.peek().word
    if first == "DROP" and second == "PRIMARY":
        return replace(altered, key=altered.key or ())
    if first == "ADD" and clause.has("PRIMARY") and (second in _NO_COLUMN or clause.has("CONSTRAINT")):
        return replace(altered, key=clause.key_columns())
    if first not in ("ADD", "DROP", "RENAME", "CHANGE", "MODIFY"):
        return _with_charset(altered, first, clause)
    if first != "CHANGE" and second in _NO_COLUMN:
        return altered
    clause.skip("COLUMN")
    clause.skip("IF", "NOT", "EXISTS")
    clause.skip("IF", "EXISTS")
    if first == "ADD" and clause.peek().text == "(" and clause.peek().kind == "sign":
        return _with_several(altered, clause, certain)
    old = clause.next().text
    if first == "DROP":
        return replace(altered, dropped=(*altered.dropped, old))
    if first == "RENAME":
        clause.skip("TO")
        return replace(altered, renamed=(*altered.renamed, (old, clause.next().text)))
    new = clause.next().text if first == "CHANGE" else old
    column = parse_column(new, clause.left, certain=certain)
    if first == "ADD":
        key = (new,) if clause.has("PRIMARY") else altered.key
        return replace(altered, added=(*altered.added, column), key=key)
    renamed = ((old, new),) if old != new else ()
    return replace(altered, renamed=altered.renamed + renamed, modified=(*altered.modified, (old, column)))


def _with_several(altered: Altered, clause: _Reader, certain: bool) -> Altered:
    """``ADD (a int, b int)``."""
    clause.next()
    inner = _Reader([_Token(kind, text) for kind, text in clause.left[:-1]], altered.table.namespace)
    while not inner.is_over:
        one = _Reader([_Token("word", "ADD"), *inner.clause()], altered.table.namespace)
        altered = _altered(altered, one, certain)
    return altered


def _with_charset(altered: Altered, first: str, clause: _Reader) -> Altered:
    """Of the table: ``[DEFAULT] CHARACTER SET x``, ``COLLATE x``; ``CONVERT TO CHARACTER SET x [COLLATE y]``."""
    words = [first, *(text.upper() if kind == "word" else "" for kind, text in clause.left if text != "=")]
    texts = [first, *(text.lower() for _, text in clause.left if text != "=")]
    charset = collation = ""
    for place, text in enumerate(texts[1:]):
        if words[place] == "CHARSET" or words[max(place - 1, 0) : place + 1] == ["CHARACTER", "SET"]:
            charset = charset_name(text)
        elif words[place] == "COLLATE":
            collation = charset_of(text)
    named = charset or collation or altered.charset
    return replace(altered, charset=named, converts=altered.converts or first == "CONVERT")


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
