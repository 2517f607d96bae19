"""The table that is read, and its fastest reader: two ``psql``, each of which copies half of it to nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from _servers import Database
from _tools import Tool, psql, side_by_side

_COLUMNS = """
    id bigint NOT NULL, quantity int, price numeric(18,4), customer text, note text, created timestamptz,
    changed timestamptz, details jsonb, open boolean, token uuid
"""
_OTHERS = "quantity, price, customer, note, created, changed, details, open, token"
_DISTINCT = 250_000
_ROW = """
    n, n % 1000, n * 1.2345, 'customer ' || n % 977, 'a note of usual length for row ' || n,
    timestamptz '2026-01-01' + n * interval '1.234567 s', now(),
    jsonb_build_object('kind', n % 7, 'tags', 'a b', 'text', 'hello ' || n), n % 3 > 0, md5(n::text)::uuid
"""


@dataclass(frozen=True, slots=True)
class Orders:
    """A table of ten columns in the schema ``public``, with ids from 1 to *rows*."""

    database: Database
    name: str
    rows: int

    @classmethod
    def load(cls, database: Database, name: str, rows: int) -> Orders:
        """Create it, filled, vacuumed and cached. The values repeat after *_DISTINCT* rows, except the id."""
        base = f"{name}_base"
        again = f"INSERT INTO {name} SELECT id + {{0}}, {_OTHERS} FROM {base} WHERE id <= {rows} - {{0}}"
        database.execute(
            f"CREATE TABLE {name} ({_COLUMNS})",
            f"CREATE UNLOGGED TABLE {base} ({_COLUMNS})",
            f"INSERT INTO {base} SELECT {_ROW} FROM generate_series(1, {min(rows, _DISTINCT)}) n",
            *(again.format(offset) for offset in range(0, rows, _DISTINCT)),
            f"DROP TABLE {base}",
            f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
            f"VACUUM (FREEZE, ANALYZE) {name}",
            "CHECKPOINT",
        )
        return cls(database, name, rows)

    @property
    def full_name(self) -> str:
        return f"public.{self.name}"

    def copy_halves(self) -> None:
        """Two ``\\copy`` side by side, each of half the blocks: a scan that nothing reads faster."""
        blocks = int(self.database.value(f"SELECT pg_relation_size('{self.name}') / 8192"))
        middle = f"'({blocks // 2},0)'"
        side_by_side(self._copy(f"ctid < {middle}"), self._copy(f"ctid >= {middle}"))

    def _copy(self, condition: str) -> Tool:
        return psql(self.database, f"\\copy (SELECT * FROM {self.name} WHERE {condition}) TO '/dev/null'")
