"""Statements in the log that change rows: which tables they write. Pure.

With ``binlog_format = STATEMENT`` or ``MIXED`` a session logs a statement instead of the rows that it changed. The rows
are unknown, so every table that the statement may have written must be read again. A statement that names its tables in
a way that is not understood here may have written any table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.sql_reader import ANSI_QUOTES, NO_BACKSLASH_ESCAPES, SqlReader, Token, tokens_of

_MODIFIERS: Final = frozenset(("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "QUICK", "IGNORE", "INTO"))
_WRITING: Final = frozenset(("INSERT", "REPLACE", "UPDATE", "DELETE", "LOAD"))
_UNKNOWN: Final = frozenset(("SELECT", "DO", "CALL", "MERGE", "VALUES"))
"""Servers log the call of a function that writes as one of these."""
_ANALYZED: Final = frozenset(("TABLE", "TABLES", "LOCAL", "NO_WRITE_TO_BINLOG"))
_AFTER_TABLES: Final = {"UPDATE": ("SET",), "DELETE": ("WHERE", "ORDER", "LIMIT", "RETURNING")}


@dataclass(frozen=True, slots=True)
class RowStatement:
    """A statement that changed rows.

    :ivar verb: its first word, such as ``UPDATE``.
    :ivar tables: it may write these, as far as its text names them; also names that are no tables (aliases, columns).
        ``None``: unknown.
    :ivar calls: names of functions that it may call, in lower case.
    """

    verb: str
    tables: tuple[TableName, ...] | None
    calls: frozenset[str]


def row_statement(sql: str, database: str, *, sql_mode: int = 0) -> RowStatement | None:
    """*sql*, run in *database*, as a statement that changed rows; ``None``: it is none."""
    tokens = tokens_of(sql, bool(sql_mode & ANSI_QUOTES))
    read = SqlReader(tokens, database)
    read.skip_settings()
    while read.is_sign("("):
        read.next()
    verb = read.word()
    if verb == "ANALYZE":  # MariaDB runs the statement, and logs it with this word
        if read.peek().word in _ANALYZED:
            return None
        if read.skip("FORMAT"):
            read.next()
            read.next()
        verb = read.word()
    if verb == "WITH":
        verb = _after_with(read)
    if verb not in _WRITING and verb not in _UNKNOWN:
        return None
    is_certain = not (sql_mode & NO_BACKSLASH_ESCAPES and "\\" in sql)
    tables = _written(verb, read) if is_certain and verb in _WRITING else None
    calls = (one.text.lower() for one, after in pairwise(tokens) if after == Token("sign", "("))
    return RowStatement(verb, tables, frozenset(calls))


def _after_with(read: SqlReader) -> str:
    """The first word after the common table expressions."""
    depth = 0
    while not read.is_over:
        token = read.next()
        if token.kind == "sign":
            depth += (token.text == "(") - (token.text == ")")
        elif not depth and token.word in _WRITING | _UNKNOWN:
            return token.word
    return "SELECT"  # not understood


def _written(verb: str, read: SqlReader) -> tuple[TableName, ...] | None:
    if verb in _AFTER_TABLES:
        return _named_before(_AFTER_TABLES[verb], read) or None
    if verb == "LOAD":
        while not read.is_over and not read.skip("INTO", "TABLE"):
            read.next()
    while read.peek().word in _MODIFIERS:
        read.next()
    return (read.table(),) if read.peek().kind in ("name", "word") else None


def _named_before(ends: tuple[str, ...], read: SqlReader) -> tuple[TableName, ...]:
    """All names before one of the words *ends* that stands in no parentheses."""
    tables: dict[TableName, None] = {}
    depth = 0
    while not read.is_over:
        token = read.peek()
        if token.kind in ("name", "word"):
            if not depth and token.word in ends:
                break
            tables[read.table()] = None
            while read.is_sign("."):  # a column after the table, or a star
                read.next()
                read.next()
            continue
        depth += (token == Token("sign", "(")) - (token == Token("sign", ")"))
        read.next()
    return tuple(tables)
