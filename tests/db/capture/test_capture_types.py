"""Every type through the whole capture: what the log holds is what the table has, to the bit."""

from __future__ import annotations

from pathlib import Path

from tests.db.capture.running import running, selected
from tests.db.postgres.oracle import assert_same, by_key, write
from tests.db.postgres.pg_types import kinds_of
from tests.servers.postgres import Database

from headwater.sources.open import open_source
from headwater.sources.postgres.connection import Dsn, connect

COLUMNS = 60


def test_the_log_holds_every_type_at_its_edges(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    names = []
    with connect(Dsn(database.dsn)) as session:
        session.execute("SET search_path = public")
        kinds = kinds_of(session)
        for part in range(0, len(kinds), COLUMNS):
            names.append(f"t{part}")
            columns = ", ".join(f"c{place} {kind.sql}" for place, kind in enumerate(kinds[part : part + COLUMNS]))
            session.execute(f"CREATE TABLE t{part} (id int PRIMARY KEY, {columns})".encode())
        with running(database, tmp_path, *names) as capture:
            for name, part in zip(names, range(0, len(kinds), COLUMNS), strict=True):
                values = [(*kind.edges, None) for kind in kinds[part : part + COLUMNS]]
                rows = [
                    [str(place), *(those[place % len(those)] for those in values)]
                    for place in range(max(map(len, values)))
                ]
                write(session, name, ["id", *(f"c{place}" for place in range(len(values)))], rows)
                session.execute(f"UPDATE {name} SET id = id + 1000 WHERE id % 3 = 0".encode())
                session.execute(f"DELETE FROM {name} WHERE id % 3 = 1 AND id > 9".encode())
            capture.catch_up()
            source = open_source(database.dsn, spill=tmp_path / "unused")
            for table in source.tables(names):
                found = capture.replayed(table.full_name).select(table.schema.names)
                assert_same(by_key(found, table), by_key(selected(database, table), table))
            source.close()
