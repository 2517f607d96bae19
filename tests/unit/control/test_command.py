"""Commands as JSON, and as mutations of barriers."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from headwater.control.command import (
    AddSink,
    AddTables,
    Command,
    PauseBackfill,
    PauseSinks,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    RewindSink,
    StopPipeline,
    ThrottleBackfill,
    command_from_json,
    command_name,
    command_to_json,
)
from headwater.control.mutation import mutation_of
from headwater.control.request import Request
from headwater.stream import (
    Barrier,
    BarrierError,
    BarrierKind,
    Epoch,
    EpochPair,
    Mutation,
    Pause,
    Resnapshot,
    Resume,
    Throttle,
)

PAIR = EpochPair(curr=Epoch.from_ms(2), prev=Epoch.from_ms(1))


@pytest.mark.parametrize(
    ("command", "value"),
    [
        (AddTables(("a", "b")), {"type": "add_tables", "tables": ["a", "b"]}),
        (PauseBackfill(), {"type": "pause_backfill", "table": None}),
        (PauseSinks("delta"), {"type": "pause_sinks", "sink": "delta"}),
        (RewindSink("delta", 7), {"type": "rewind_sink", "sink": "delta", "epoch": 7}),
        (StopPipeline(), {"type": "stop_pipeline"}),
        (
            ResnapshotTable("t", ("1",), ("2",), ("note",)),
            {"type": "resnapshot_table", "table": "t", "start": ["1"], "end": ["2"], "columns": ["note"]},
        ),
    ],
)
def test_a_command_reads_back_from_its_json(command: Command, value: dict[str, Any]) -> None:
    assert json.loads(json.dumps(command_to_json(command))) == value
    assert command_from_json(value) == command


def test_each_kind_has_a_name_and_a_docstring_of_its_own() -> None:
    kinds = get_args(Command)
    assert len({command_name(kind) for kind in kinds}) == len(kinds)
    assert all(kind.__doc__ and not kind.__doc__.startswith(kind.__name__) for kind in kinds)


@pytest.mark.parametrize(
    "value", [{}, {"type": "paint"}, {"type": 1}, {"type": "add_sink"}, {"type": "stop_pipeline", "colour": "red"}, []]
)
def test_what_is_no_command_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no command"):
        command_from_json(value)


def test_a_request_reads_back_from_its_record() -> None:
    request = Request(AddSink("archive"), "shop-delta", "ada@host")
    assert Request.parse(json.dumps(request.to_json()).encode()) == request
    for data in (b"", b"[]", b"{}", b'{"command": {"type": "stop_pipeline"}, "colour": "red"}'):
        with pytest.raises(ValueError):  # noqa: PT011 - of any text
            Request.parse(data)


@pytest.mark.parametrize(
    ("command", "table", "mutation"),
    [
        (PauseBackfill(), None, Pause()),
        (PauseBackfill("t"), "public.t", Pause("public.t")),
        (ResumeBackfill("t"), "public.t", Resume("public.t")),
        (ThrottleBackfill(None), None, Throttle(None)),
        (ThrottleBackfill(0, "t"), "public.t", Throttle(0, "public.t")),
        (ResnapshotTable("t", ("1",)), "public.t", Resnapshot("public.t", ("1",))),
    ],
)
def test_a_query_applies_a_command_as_the_mutation_of_a_barrier(
    command: QueryCommand, table: str | None, mutation: Mutation
) -> None:
    assert mutation_of(command, table) == mutation
    barrier = Barrier(PAIR, BarrierKind.CHECKPOINT, mutation)
    assert Barrier.from_json(barrier.to_json()) == barrier


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(BarrierError, match="rows_per_second=-1"):
        mutation_of(ThrottleBackfill(-1))
