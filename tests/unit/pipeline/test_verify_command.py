"""``headwater verify``: what it prints and how it ends, for findings of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import verify as command
from headwater.cli.main import app
from headwater.pipeline.verify import Findings, Options
from headwater.sources.splits import Cut, KeyRange

RIGHT = Findings("public.orders", 1000, 1000, unsettled=2, rounds=3, sink="delta")
WRONG = Findings(
    "public.lines",
    10,
    11,
    mismatches=1,
    extra=1,
    sink="delta",
    ranges=(KeyRange(None, Cut(("-5", "it's"))), KeyRange(Cut(("7", "x")), None)),
    keys=({"id": -6, "part": "a"},),
)
BEHIND = Findings("public.late", 10, 9, unsettled=1, is_behind=True, sink="delta")
Answer = Callable[..., Any]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Runs the command over findings that are given."""
    monkeypatch.setattr(command, "load", lambda path: path)

    def run(found: list[Findings], *arguments: str, columns: int = 200) -> Any:
        class Told:
            def __init__(self, _config: object, tables: object, sinks: object) -> None:
                self.asked = (tables, sinks)

            def run(self, options: Options, progress: Callable[[str, str, int, int], None]) -> Iterator[Findings]:
                for one in found:
                    progress(one.sink, one.table, 1, 2)
                    yield one if options.keys else Findings(**{**_fields(one), "keys": ()})

        monkeypatch.setattr(command, "Verification", Told)
        return CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": str(columns)})

    return run


def _fields(one: Findings) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Findings.__slots__}


def test_equal_sides_end_with_0_also_while_keys_move(answer: Answer) -> None:
    done = answer([RIGHT])
    assert done.exit_code == 0
    assert "public.orders" in done.output
    assert "next:" not in done.output


def test_a_narrow_terminal_shows_every_number(answer: Answer) -> None:
    found = [Findings("public.customers", 302_118, 302_099, missing=1, sink="delta", seconds=14.25)]
    done = answer(found, columns=80)
    for words in ("public.customers", "302,118", "302,099", "doubled", "moving"):
        assert words in done.output
    assert "…" not in done.output


def test_differences_end_with_1_and_the_commands_that_mend_them(answer: Answer) -> None:
    done = answer([RIGHT, WRONG])
    assert done.exit_code == 1
    assert """headwater resnapshot public.lines --to=-5 '--to=it'"'"'s'""" in done.output
    assert "headwater resnapshot public.lines --from=7 --from=x" in done.output


def test_another_file_is_named_in_the_command() -> None:
    told = command.resnapshot("public.t", KeyRange(Cut(("1",)), Cut(("2",))), Path("shop.toml"))
    assert told == "headwater resnapshot public.t --from=1 --to=2 --pipeline shop.toml"


def test_a_sink_that_is_behind_ends_with_1_and_is_no_difference(answer: Answer) -> None:
    done = answer([BEHIND])
    assert done.exit_code == 1
    assert "behind" in done.output
    assert "headwater status" in done.output
    assert "resnapshot" not in done.output


def test_keys_are_shown_only_when_they_are_asked_for(answer: Answer) -> None:
    assert "id=-6" not in answer([WRONG]).output
    assert "id=-6, part=a" in answer([WRONG], "--show-keys").output


def test_json_has_every_count_and_range_and_nothing_else_is_printed(answer: Answer) -> None:
    done = answer([RIGHT, WRONG], "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["right"] is False
    assert [one["table"] for one in told["tables"]] == ["public.orders", "public.lines"]
    assert told["tables"][1]["ranges"] == [[None, [["-5", "it's"], False]], [[["7", "x"], False], None]]
    assert (told["tables"][1]["mismatches"], told["tables"][1]["extra"], told["tables"][1]["keys"]) == (1, 1, [])
