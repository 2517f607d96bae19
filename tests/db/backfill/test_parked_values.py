"""Rows that a special value parks: kept apart with the reason, gone from the mirror, resolved by a good value."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.backfill.parking import Parking
from tests.db.backfill.shops import MARIADB, POSTGRES, Shop, only, running, shared

from headwater.failpoints import FailpointError, arm
from headwater.sinks.sink import Mode
from headwater.sources.table import SpecialValues

pytestmark = pytest.mark.db

TABLE = "public.orders"
PARK = {TABLE: SpecialValues.PARK}


@shared(POSTGRES, MARIADB)
def test_rows_with_special_values_are_parked_and_resolved(shop: Shop, tmp_path: Path) -> None:
    odd = "infinity" if shop.kind == POSTGRES else "0000-00-00"
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, day date, n int)",
        f"INSERT INTO orders VALUES (1, '2026-01-01', 1), (2, '{odd}', 2), (3, NULL, 3), (4, '{odd}', 4)",
    )
    with running(shop, tmp_path, TABLE, special_values=PARK) as capture:
        query = Parking(capture, TABLE)
        query.finish()
        assert query.mirror("day").keys() == {1, 3}
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
        assert query.mirror("day").keys() == {2, 6}
        assert query.letters.keys() == {1, 4, 5, 7}

        shop.execute("UPDATE orders SET day = NULL WHERE id = 1", "DELETE FROM orders WHERE id = 4")
        query.catch_up()
        assert query.letters.keys() == {5, 7}
        assert query.mirror("day")[1] is None

        shop.execute(f"UPDATE orders SET n = 0, day = '{odd}' WHERE id = 2", "UPDATE orders SET n = 0 WHERE id = 5")
        capture.catch_up()
        arm("delivery.before_pending=raise")  # the letters are committed, the batch is not
        with pytest.raises(FailpointError):
            query.batch(5.0)
        arm("")
        query.close()  # another process goes on
        query.open()
        query.catch_up()
        assert query.letters.keys() == {2, 5, 7}
        assert query.mirror("day").keys() == {1, 6}

        query.read_again()
        assert (set(query.letters), set(query.mirror("day"))) == ({2, 5, 7}, {1, 6})
        shop.execute("TRUNCATE orders", f"INSERT INTO orders VALUES (8, '{odd}', 8), (9, '2026-01-09', 9)")
        query.catch_up()
        assert (set(query.letters), set(query.mirror("day"))) == ({8}, {9})
        shop.execute("UPDATE orders SET day = '2026-01-08'")
        query.catch_up()
        assert (len(query.letters), set(query.mirror("day"))) == (0, {8, 9})
        query.planner.close()


@only(POSTGRES)
def test_every_kind_of_special_value_parks_its_row(shop: Shop, tmp_path: Path) -> None:
    """In a table whose log tells old rows as a whole, and into a sink that keeps all versions."""
    kinds = {
        "numeric(9,2)": ["NaN"],
        "date": ["infinity", "0044-03-15 BC", "10000-01-01"],
        "timestamp": ["-infinity", "0044-03-15 00:00:00 BC"],
        "timestamptz": ["infinity"],
        "time": ["24:00:00"],
        "date[]": ["{2026-01-01,infinity}", "[2:2]={2026-01-01}"],
        "numeric(9,2)[]": ["{NaN}"],
    }
    columns = ", ".join(f"c{place} {kind}" for place, kind in enumerate(kinds))
    shop.execute(f"CREATE TABLE orders (id bigint PRIMARY KEY, name text, {columns})")
    shop.execute("ALTER TABLE orders REPLICA IDENTITY FULL", "INSERT INTO orders VALUES (0, 'plain')")
    values = [(place, value) for place, some in enumerate(kinds.values()) for value in some]

    def insert(start: int) -> None:
        for key, (place, value) in enumerate(values, start):
            shop.execute(f"INSERT INTO orders (id, c{place}) VALUES ({key}, '{value}')")

    insert(100)
    with running(shop, tmp_path, TABLE, special_values=PARK) as capture:
        query = Parking(capture, TABLE, mode=Mode.HISTORY, keyed=False)
        query.finish()
        insert(200)
        query.catch_up()
        expected = {start + number: place for start in (100, 200) for number, (place, _) in enumerate(values)}
        assert query.letters == {
            key: f"Special value: column 'c{place}' holds a value that the type does not have."
            for key, place in expected.items()
        }
        assert query.rows(TABLE).column("id").to_pylist() == [0]
        shop.execute("UPDATE orders SET " + ", ".join(f"c{place} = NULL" for place in range(len(kinds))))
        query.catch_up()
        assert query.letters == {}
        assert set(query.rows(TABLE).column("id").to_pylist()) == {0, *expected}
        query.planner.close()
