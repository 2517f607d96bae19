"""Which capture instance tells which commits, and what is told between; and when the log is known to be read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headwater.sources.errors import LogPurged, SchemaStopped
from headwater.sources.events import Event, SchemaChanged, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.sqlserver.followed import FollowedTables, Stretch
from headwater.sources.sqlserver.instances import CapturedColumn, CaptureInstance
from headwater.sources.sqlserver.log_watch import Holds, Scan
from headwater.sources.sqlserver.offset import Lsn
from headwater.sources.sqlserver.types import SqlType, Ticks, source_column
from headwater.sources.table import SourceTable

INT = SqlType("int")
ID, N, RATE = (
    CapturedColumn(1, "id", INT, False),
    CapturedColumn(2, "n", INT, False),
    CapturedColumn(3, "rate", INT, False),
)
TABLE = SourceTable("shop", "orders", (source_column("id", INT, 1), source_column("n", INT, 2)), ("id",), 7)
OTHER = SourceTable("shop", "others", (source_column("id", INT, 1),), ("id",), 8)
OLDER = CaptureInstance("older", 7, Lsn(10), (ID, N))
NEWER = CaptureInstance("newer", 7, Lsn(50), (ID, N, RATE))


def lost(table: SourceTable, what: str) -> SchemaStopped:
    return SchemaStopped(table.full_name, what, next_step=f"Run: headwater resnapshot {table.full_name}")


def told(
    instances: Sequence[CaptureInstance],
    first: int,
    last: int,
    *,
    altered: int | None = None,
    was_told: bool = False,
    policy: SchemaPolicy = SchemaPolicy.EVOLVE,
    tables: FollowedTables | None = None,
) -> list[tuple[object, ...]]:
    """What is read and told: instances with their ranges and what they lack, and kinds of events."""
    followed = tables or FollowedTables([TABLE], policy, {}, Ticks.REFUSE, lambda _, __: None, lost)
    by_table: dict[int, list[CaptureInstance]] = {}
    for instance in instances:
        by_table.setdefault(instance.table_id, []).append(instance)
    found: list[Stretch | Event] = list(
        followed.stretches(
            by_table,
            Lsn(first),
            Lsn(last),
            lambda *_: None if altered is None else Lsn(altered),
            lambda *_: was_told,
        )
    )
    return [
        (one.instance.name, int(one.first), int(one.last), *one.missing)
        if isinstance(one, Stretch)
        else (type(one).__name__,)
        for one in found
    ]


def test_one_instance_tells_all() -> None:
    assert told([OLDER], 20, 30) == [("older", 20, 30)]


def test_the_newer_instance_tells_from_its_first_number_on_and_the_older_one_up_to_there() -> None:
    assert told([OLDER, NEWER], 20, 80) == [("older", 20, 49), ("SchemaChanged",), ("newer", 50, 80)]
    assert told([OLDER, NEWER], 20, 49) == [("older", 20, 49)]
    assert told([OLDER, NEWER], 50, 80) == [("SchemaChanged",), ("newer", 50, 80)]


def test_rows_after_a_column_came_and_before_its_instance_lack_it() -> None:
    assert told([OLDER, NEWER], 20, 80, altered=40) == [
        ("older", 20, 40),
        ("SchemaChanged",),
        ("older", 41, 49, "rate"),
        ("newer", 50, 80),
    ]


def test_a_table_stops_where_such_rows_were_told_before() -> None:
    assert told([OLDER, NEWER], 45, 80, altered=40, was_told=True) == [("Stopped",)]
    assert told([OLDER, NEWER], 45, 80, altered=40) == [
        ("SchemaChanged",),
        ("older", 45, 49, "rate"),
        ("newer", 50, 80),
    ]
    with pytest.raises(SchemaStopped, match="headwater resnapshot"):
        told([OLDER, NEWER], 45, 80, altered=40, was_told=True, policy=SchemaPolicy.STOP)


def test_statements_that_bring_no_column_make_no_gap() -> None:
    same = CaptureInstance("same", 7, Lsn(50), (ID, N))
    assert told([OLDER, same], 20, 80, altered=40) == [("older", 20, 49), ("same", 50, 80)]


def test_what_was_cleaned_up_ends_the_capture_and_what_was_removed_stops_its_table() -> None:
    with pytest.raises(LogPurged, match="headwater resnapshot"):
        told([NEWER], 20, 80)
    assert told([], 20, 80) == [("Stopped",)]
    both = FollowedTables([TABLE, OTHER], SchemaPolicy.EVOLVE, {}, Ticks.REFUSE, lambda _, __: None, lost)
    kept = CaptureInstance("kept", 8, Lsn(10), (ID,))
    assert told([NEWER, kept], 20, 80, tables=both) == [("Stopped",), ("kept", 20, 80)]


def test_a_table_that_came_later_is_read_from_there_on() -> None:
    later = FollowedTables(
        [TABLE], SchemaPolicy.EVOLVE, {}, Ticks.REFUSE, lambda _, __: None, lost, {("shop", "orders"): Lsn(60)}
    )
    assert told([NEWER], 20, 55, tables=later) == []
    assert told([NEWER], 20, 80, tables=later) == [("SchemaChanged",), ("newer", 60, 80)]


def test_an_instance_without_the_key_stops_its_table() -> None:
    assert told([CaptureInstance("keyless", 7, Lsn(10), (N,))], 20, 30) == [("Stopped",)]


def test_events_are_of_the_table() -> None:
    followed = FollowedTables([TABLE], SchemaPolicy.EVOLVE, {}, Ticks.REFUSE, lambda _, __: None, lost)
    found = list(followed.stretches({7: [NEWER]}, Lsn(60), Lsn(70), lambda *_: None, lambda *_: False))
    assert isinstance(found[0], SchemaChanged)
    assert found[0].added == ("rate",)
    gone = list(followed.stretches({}, Lsn(71), Lsn(80), lambda *_: None, lambda *_: False))
    assert isinstance(gone[0], Stopped)
    assert gone[0].reason == "Its last capture instance was removed. Run: headwater resnapshot shop.orders"


def test_an_instance_without_the_key_is_removed_where_the_table_has_two_and_added_to_where_it_is_the_only_one() -> None:
    keyless = CaptureInstance("keyless", 7, Lsn(50), (N,))
    assert _advice([OLDER, keyless]).startswith("Run: EXEC sys.sp_cdc_disable_table")
    assert _advice([keyless]).startswith("Run: EXEC sys.sp_cdc_enable_table")


def _advice(instances: Sequence[CaptureInstance]) -> str:
    followed = FollowedTables([TABLE], SchemaPolicy.STOP, {}, Ticks.REFUSE, lambda _, __: None, lost)
    with pytest.raises(SchemaStopped) as stopped:
        list(followed.stretches({7: instances}, Lsn(60), Lsn(70), lambda *_: None, lambda *_: False))
    return str(stopped.value.next_step)


def test_the_log_is_read_when_the_job_has_looked_twice_and_found_nothing() -> None:
    seen = Scan(5, 3)
    assert not Scan(5, 3).has_looked_twice_since(seen)
    assert not Scan(5, 4).has_looked_twice_since(seen)  # which may have begun before
    assert Scan(5, 5).has_looked_twice_since(seen)
    assert not Scan(6, 9).has_looked_twice_since(seen)  # it has found something meanwhile


def test_looks_of_a_job_that_failed_are_not_counted() -> None:
    assert not Scan(3, 9, failures=1).has_looked_twice_since(Scan(3, 2))
    assert not Scan(3, 9, failures=1).goes_on_from(Scan(3, 2))


def test_looks_are_believed_as_far_as_the_job_may_read() -> None:
    assert Holds().readable(Lsn(50)) == 50
    assert Holds(has_replicas=True, hardened=Lsn(40)).readable(Lsn(50)) == 40
    assert Holds(has_replicas=True, hardened=Lsn(60)).readable(Lsn(50)) == 50
    assert Holds(has_replicas=True).readable(Lsn(50)) is None
    assert Holds(waits_for_backup=True).readable(Lsn(50)) is None
