"""A query into a Delta table whose special values park rows."""

from __future__ import annotations

from typing import Any

from tests.db.backfill.test_into_delta import IntoDelta, _ask

from headwater.control.command import ResnapshotTable
from headwater.sinks.dead_letters import DeadLetters


class Parking(IntoDelta):
    """:ivar key: the key column of its table."""

    key = "id"

    @property
    def delivery_options(self) -> dict[str, Any]:
        return {"parked": str(self.capture.folder / "letters")}

    @property
    def table(self) -> str:
        return self.options.tables[0]

    @property
    def letters(self) -> dict[Any, str]:
        """The reasons by key."""
        found = DeadLetters(self.delivery_options["parked"])
        rows = found.rows(self.table).to_pylist() if found.tables() else []
        assert len({row[self.key] for row in rows}) == len(rows)
        return {row[self.key]: row["_reason"] for row in rows}

    def mirror(self, column: str) -> dict[Any, Any]:
        """The values of a column by key."""
        found = self.rows(self.table)
        return dict(zip(found.column(self.key).to_pylist(), found.column(column).to_pylist(), strict=True))

    def catch_up(self) -> None:
        self.capture.catch_up()
        while self.batch(0.3):
            pass

    def read_again(self) -> None:
        """The whole history, once more."""
        _ask(self, ResnapshotTable())
        self.finish()
