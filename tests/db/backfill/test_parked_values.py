"""Rows that a special value parks: kept apart with the reason, gone from the mirror, resolved by a good value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, only, running
from tests.db.backfill.test_into_delta import IntoDelta

from headwater.sinks.dead_letters import DeadLetters
from headwater.sources.table import SpecialValues

pytestmark = pytest.mark.db

TABLE = "public.orders"
PARK = {TABLE: SpecialValues.PARK}


class Parking(IntoDelta):
    @property
    def delivery_options(self) -> dict[str, Any]:
        return {"parked": str(self.capture.folder / "letters")}

    @property
    def letters(self) -> dict[int, str]:
        """The reasons by id."""
        found = DeadLetters(self.delivery_options["parked"])
        rows = found.rows(TABLE).to_pylist() if found.tables() else []
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row["_reason"] for row in rows}

    def days(self) -> dict[int, Any]:
        found = self.rows(TABLE)
        return dict(zip(found.column("id").to_pylist(), found.column("day").to_pylist(), strict=True))

    def catch_up(self) -> None:
        self.capture.catch_up()
        while self.batch(0.5):
            pass


@only(POSTGRES, MARIADB, MYSQL)
def test_rows_with_special_values_are_parked_and_resolved(shop: Shop, tmp_path: Path) -> None:
    odd = "infinity" if shop.kind == POSTGRES else "0000-00-00"
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, day date, n int)",
        f"INSERT INTO orders VALUES (1, '2026-01-01', 1), (2, '{odd}', 2), (3, NULL, 3), (4, '{odd}', 4)",
    )
    with running(shop, tmp_path, TABLE, special_values=PARK) as capture:
        query = Parking(capture, TABLE)
        query.finish()
        assert query.days().keys() == {1, 3}  # history
        assert query.letters.keys() == {2, 4}
        assert set(query.letters.values()) == {"Special value: column 'day' holds a value that the type does not have."}

        shop.execute(
            f"UPDATE orders SET day = '{odd}' WHERE id = 1",  # its old version goes
            f"INSERT INTO orders VALUES (5, '{odd}', 5)",
            f"INSERT INTO orders VALUES (6, '{odd}', 6)",
            "UPDATE orders SET day = '2026-01-06' WHERE id = 6",  # good again in the same batch
            f"UPDATE orders SET id = 7, day = '{odd}' WHERE id = 3",
            "UPDATE orders SET day = '2026-01-02' WHERE id = 2",
        )
        query.catch_up()
        assert query.days().keys() == {2, 6}
        assert query.letters.keys() == {1, 4, 5, 7}

        shop.execute("UPDATE orders SET day = NULL WHERE id = 1", "DELETE FROM orders WHERE id = 4")
        query.catch_up()
        assert query.letters.keys() == {5, 7}
        assert query.days()[1] is None

        query.planner.close()  # another process goes on
        query.open()
        shop.execute(f"UPDATE orders SET n = n + 1, day = '{odd}' WHERE id = 2", "UPDATE orders SET n = 0 WHERE id = 5")
        query.catch_up()
        assert query.letters.keys() == {2, 5, 7}
        shop.execute("TRUNCATE orders", f"INSERT INTO orders VALUES (8, '{odd}', 8), (9, '2026-01-09', 9)")
        query.catch_up()
        assert (query.letters.keys(), query.days().keys()) == ({8}, {9})
        shop.execute("UPDATE orders SET day = '2026-01-08'")
        query.catch_up()
        assert (query.letters, query.days().keys()) == ({}, {8, 9})
        query.planner.close()
