"""Texts with half a surrogate pair, which servers take and which are no Unicode: in history and in changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.parking import Parking
from tests.db.sqlserver.running import SqlServerCapture, running
from tests.servers.sqlserver import AnySqlServer, track

from headwater.capture.renewal import renew
from headwater.sources.errors import BrokenText
from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SpecialValues

NOTES = "shop.notes"
HALF = "CONVERT(nvarchar(40), 0x7300650063007200650074003DD8)"  # what can be read of it is "secret"
LONG = f"CONVERT(nvarchar(max), 0x{'6100' * 4200}3DD8)"
NULL: Mapping[str, SpecialValues] = {f"{NOTES}.note": SpecialValues.NULL, f"{NOTES}.body": SpecialValues.NULL}


@pytest.fixture(params=["compiled", "library"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows by the compiled code and by the library's own."""
    if request.param == "library":
        monkeypatch.setenv("HEADWATER_PURE", "1")
    return str(request.param)


def create_notes(server: AnySqlServer, key: str = "int") -> None:
    server.execute(
        f"CREATE TABLE shop.notes (id {key} NOT NULL PRIMARY KEY, title nvarchar(40), note nvarchar(40),"
        " body nvarchar(max))"
    )
    track(server, "notes")


def read(server: AnySqlServer, folder: Path, special: Mapping[str, SpecialValues] | None = None) -> list[Any]:
    """The rows of the history."""
    source = open_source(server.dsn, spill=folder / "unused", special_values=special)
    (table,) = source.tables([NOTES])
    source.close()
    batches = open_snapshots(server.dsn).read(table, SplitKind.KEY, KeyRange(), None)
    return [row for batch in batches for row in batch.to_pylist()]


def assert_named(failure: BaseException, column: str) -> None:
    """The table, the column and what to do, and nothing of the value."""
    assert isinstance(failure, BrokenText)
    assert (failure.table, failure.column) == (NOTES, column)
    assert f"Set special_values of {NOTES}.{column} to null" in str(failure)
    assert str(failure).endswith(f"headwater resnapshot {NOTES}")
    assert "secret" not in str(failure)
    assert failure.__cause__ is None


@pytest.mark.parametrize("allowed", [True, False], ids=["snapshot", "read committed"])
def test_history_names_the_column_of_half_a_pair(
    server: AnySqlServer, tmp_path: Path, decoder: str, allowed: bool
) -> None:
    create_notes(server)
    server.execute(f"ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION {'ON' if allowed else 'OFF'}")
    server.execute(f"INSERT INTO shop.notes VALUES (1, N'whole', {HALF}, N'whole')")
    with pytest.raises(BrokenText) as refused:
        read(server, tmp_path)
    assert_named(refused.value, "note")
    server.execute(f"UPDATE shop.notes SET note = N'mended', body = {LONG}")
    with pytest.raises(BrokenText) as refused:
        read(server, tmp_path)
    assert_named(refused.value, "body")


def test_history_has_null_for_half_a_pair_where_that_is_the_policy(
    server: AnySqlServer, tmp_path: Path, decoder: str
) -> None:
    create_notes(server)
    server.execute(
        f"INSERT INTO shop.notes VALUES (1, N'whole', {HALF}, {LONG})",
        "INSERT INTO shop.notes VALUES (2, N'whole', N'fish 🐟', N'whole')",
    )
    assert [tuple(row.values()) for row in read(server, tmp_path, NULL)] == [
        (1, "whole", None, None),
        (2, "whole", "fish 🐟", "whole"),
    ]


def test_changes_name_the_column_of_half_a_pair_and_go_on_with_null_where_that_is_the_policy(
    server: AnySqlServer, tmp_path: Path, decoder: str
) -> None:
    create_notes(server)
    capture = SqlServerCapture(server, tmp_path, [NOTES])
    capture.start()
    server.execute("INSERT INTO shop.notes VALUES (1, N'whole', N'whole', N'whole')")
    capture.catch_up()
    server.execute(f"INSERT INTO shop.notes VALUES (2, N'whole', {HALF}, {LONG})")
    assert "column 'note'" in capture.wait_until_stopped(NOTES)
    capture.stop()
    with running(server, tmp_path, NOTES, special_values=NULL) as again:
        assert not renew(again.store, [NOTES])
        server.execute(f"INSERT INTO shop.notes VALUES (3, N'whole', {HALF}, {LONG})")
        again.catch_up()
        found = [(row["id"], row["title"], row["note"], row["body"]) for row in again.rows(NOTES)]
        assert found == [(1, "whole", "whole", "whole"), (3, "whole", None, None)]


def test_a_special_value_stops_its_table_alone_after_the_commits_before_it(
    server: AnySqlServer, tmp_path: Path
) -> None:
    create_notes(server)
    server.execute("CREATE TABLE shop.moments (id int NOT NULL PRIMARY KEY, at datetime2(7), n int)")
    track(server, "moments")
    with running(server, tmp_path, "shop.moments", NOTES) as capture:
        server.execute(
            "INSERT INTO shop.moments VALUES (1, '2026-01-01T00:00:00.1234560', 1)",
            "INSERT INTO shop.moments VALUES (2, '2026-01-01T00:00:00.1234567', 2)",
            "INSERT INTO shop.moments VALUES (3, '2026-01-01T00:00:00.1234560', 3)",
            "INSERT INTO shop.notes VALUES (1, N'whole', N'whole', N'whole')",
        )
        reason = capture.wait_until_stopped("shop.moments")
        assert "column 'at' (datetime2(7)) holds digits below the microsecond" in reason
        assert [row["id"] for row in capture.rows("shop.moments")] == [1]
        capture.assert_equal(NOTES)
    with running(server, tmp_path, "shop.moments", NOTES, special_values={"shop.moments": SpecialValues.TEXT}) as again:
        assert not renew(again.store, ["shop.moments"])
        server.execute("INSERT INTO shop.moments VALUES (4, '2026-01-01T00:00:00.1234567', 4)")
        again.catch_up()
        (told,) = [row for row in again.rows("shop.moments") if row["id"] == 4]
        assert (told["at"][-8:], told["n"]) == (".1234567", 4)


def test_rows_with_special_values_are_parked_and_resolved(server: AnySqlServer, tmp_path: Path) -> None:
    server.execute("CREATE TABLE shop.moments (id int NOT NULL PRIMARY KEY, at datetime2(7))")
    track(server, "moments")
    odd, good = "'2026-01-01T00:00:00.1234567'", "'2026-01-01T00:00:00'"
    server.execute(f"INSERT INTO shop.moments VALUES (1, {good}), (2, {odd}), (3, NULL)")
    with running(server, tmp_path, "shop.moments", special_values={"shop.moments": SpecialValues.PARK}) as capture:
        query = Parking(capture, "shop.moments")
        query.finish()
        assert (set(query.mirror("at")), set(query.letters)) == ({1, 3}, {2})
        server.execute(
            f"UPDATE shop.moments SET at = {good} WHERE id = 2", f"UPDATE shop.moments SET at = {odd} WHERE id = 1"
        )
        query.catch_up()
        assert (set(query.mirror("at")), set(query.letters)) == ({2, 3}, {1})
        server.execute("DELETE FROM shop.moments WHERE id = 1")
        query.catch_up()
        assert query.letters == {}
        query.planner.close()


def test_a_key_with_half_a_pair_is_named_also_while_its_table_is_cut_into_splits(
    server: AnySqlServer, tmp_path: Path
) -> None:
    create_notes(server, "nvarchar(40)")
    server.execute(
        "INSERT INTO shop.notes VALUES (N'a', N'', N'', N'')", f"INSERT INTO shop.notes VALUES ({HALF}, N'', N'', N'')"
    )
    source = open_source(server.dsn, spill=tmp_path / "unused", special_values={f"{NOTES}.id": SpecialValues.NULL})
    (table,) = source.tables([NOTES])
    source.close()
    with open_snapshots(server.dsn).export() as snapshot:  # type: ignore[attr-defined]
        with pytest.raises(BrokenText, match="column 'id'") as refused:
            snapshot.plan(table, split_rows=1)
        assert refused.value.next_step is not None
        assert "null" not in refused.value.next_step  # a row without its key cannot be placed
        assert snapshot.plan(table, split_rows=10).rows == 2
    with pytest.raises(BrokenText, match="column 'id'"):
        read(server, tmp_path, {f"{NOTES}.id": SpecialValues.NULL})
