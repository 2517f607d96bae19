"""What a person sees of a pipeline."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from headwater.cli.run_view import news_of
from headwater.cli.status import Rates, duration, view
from headwater.pipeline.status import DerivedStatus, PipelineStatus, SinkStatus, TableStatus, split_step
from headwater.versioned.status import KeptStatus, PinStatus

READING = TableStatus(
    "public.orders", "reading", rows=1000, total=4000, rows_per_second=500.0, eta_seconds=6.0, lag_rows=3, lag_seconds=1
)
LIVE = TableStatus("public.lines", "live", rows=10, total=10)


def status(*tables: TableStatus, **fields: object) -> PipelineStatus:
    sink = SinkStatus("delta", "delta", "mirror", "/lake", "running", tables)
    told: dict[str, object] = {"capture": {"state": "running", "rows": 5, "lag_seconds": 0.25}, "sinks": (sink,)}
    return PipelineStatus("shop", "/store", True, "process 1", "running", **(told | fields))  # type: ignore[arg-type]


def shown(found: PipelineStatus, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view(found, Rates()))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_history_shows_its_rows_rate_and_rest_and_a_live_table_its_lag() -> None:
    text = shown(status(READING, LIVE))
    for words in ("shop · running", "lag 0.2 s", "1,000 of 4,000", "500", "6.0 s", "3 rows, 1.0 s", "live"):
        assert words in text, text


def test_a_table_that_comes_from_our_own_shows_its_phase_and_the_epochs_that_are_left() -> None:
    reading = replace(READING, origin="tables")
    settling = TableStatus(
        "public.lines", "settling", rows=10, origin="tables", lag_rows=7, lag_seconds=2, lag_epochs=4
    )
    text = shown(status(reading, settling))
    for words in ("snapshot", "1,000 of 4,000", "change log", "7 rows, 4 epochs, 2.0 s"):
        assert words in text, text


def test_a_kept_table_shows_its_base_and_who_pins_it_for_how_long() -> None:
    pin = PinStatus("shop-lake", 11_639_512_937_332_736, 124.0, "process 7 on vm", False, "query-shop-lake", True)
    kept = KeptStatus(True, 11_639_512_937_332_736, 3, 10, 5 << 20, (pin,))
    text = shown(status(replace(LIVE, kept=kept), replace(READING, kept=KeptStatus(False, 0, 1, 1, 100))))
    for words in ("base epoch", "5.0 MiB", "shop-lake at 11639512937332736, 2 min 4 s ago", "not complete"):
        assert words in text, text


def test_a_pin_whose_process_is_gone_and_a_derived_table_that_failed_say_how_to_let_go() -> None:
    pin = PinStatus("shop-lake", 5, 124.0, "process 7 on vm", True, "query-shop-lake", True)
    table = replace(LIVE, kept=KeptStatus(True, 5, 3, 10, 100, (pin,)))
    derived = DerivedStatus("sales", "derived.sales", ("public.lines",), ("day",), "delta", "failed", "live", epoch=7)
    text = shown(status(table, derived=(derived,)))
    for words in ("shop-lake: it holds public.lines, and its process is gone.", "headwater pins release 'shop-lake'"):
        assert words in text, text
    for words in ("public.lines are held at epoch 7 for it", "To let go of them: headwater sink drop sales"):
        assert words in text, text
    young = replace(table, kept=KeptStatus(True, 5, 3, 10, 100, (replace(pin, age_seconds=3.0),)))
    assert "is gone" not in shown(status(young))
    assert "is gone" not in shown(replace(status(table), running=False)), "it comes back with the pipeline"


def test_a_narrow_terminal_shows_names_and_numbers_and_leaves_the_bars_out() -> None:
    limited = replace(READING, limit=20_000, rows=161_053, total=300_000)
    assert "━" in shown(status(limited, LIVE))
    text = shown(status(limited, LIVE), width=80)
    for words in ("public.orders", "public.lines", "161,053", "300,000", "20,000", "6.0 s"):
        assert words in text, text
    assert "…" not in text
    assert "━" not in text


def test_a_paused_a_stopped_and_a_waiting_table_say_so() -> None:
    paused = TableStatus("public.a", "reading", paused=True)
    stopped = TableStatus("public.b", "stopped", reason="its key changed.", next_step="Run: headwater resnapshot b")
    waiting = TableStatus("public.c", "waiting", waiting="a commit is not visible yet")
    rereading = TableStatus("public.d", "rereading", rows=41, total=100, columns=("note",))
    text = shown(status(paused, stopped, waiting, rereading))
    for words in ("paused", "public.b: its key changed.", "next: Run: headwater resnapshot b", "rereading note 41 %"):
        assert words in text, text
    assert "a commit is not visible yet" in text
    for phase in ("stopped", "rereading", "incomplete"):
        assert not status(LIVE, replace(LIVE, phase=phase)).is_live


def test_a_lag_that_nobody_knows_is_unknown_and_a_silent_process_says_since_when() -> None:
    silent = {"state": "not responding", "rows": 5, "lag_seconds": None, "silent_since_ms": 1000, "pid": 7}
    text = shown(status(replace(LIVE, lag_seconds=None), capture=silent))
    for words in ("capture not responding since", "lag unknown", "kill -9 7"):
        assert words in text, text
    assert text.splitlines()[2].rstrip().endswith("unknown")
    assert shown(status(replace(LIVE, lag_seconds=0.0))).splitlines()[2].rstrip().endswith(" 0")


@pytest.mark.parametrize(
    ("text", "reason", "step"),
    [
        ("Its key changed. Run: headwater resnapshot a.b", "Its key changed.", "Run: headwater resnapshot a.b"),
        (
            "It is not in p. Run: ALTER PUBLICATION p ADD TABLE a.b; Run: headwater resnapshot a.b",
            "It is not in p.",
            "Run: ALTER PUBLICATION p ADD TABLE a.b; Run: headwater resnapshot a.b",
        ),
        (
            "It changed. Set x.y; then run: headwater resnapshot",
            "It changed.",
            "Set x.y; then run: headwater resnapshot",
        ),
        (
            "It is a view. Replace it with a table. Then run: headwater resnapshot a.b",
            "It is a view.",
            "Replace it with a table. Then run: headwater resnapshot a.b",
        ),
        ("Nothing to do.", "Nothing to do.", None),
    ],
)
def test_a_reason_is_divided_from_what_to_do(text: str, reason: str, step: str | None) -> None:
    assert split_step(text) == (reason, step)


def test_a_failure_is_shown_once_with_what_to_do() -> None:
    text = shown(status(LIVE, error="The slot is gone.", next_step="Run: headwater resnapshot"))
    assert text.count("The slot is gone.") == 1
    assert "next: Run: headwater resnapshot" in text


def test_a_pipeline_is_live_when_every_table_is_and_nothing_failed() -> None:
    assert status(LIVE).is_live
    assert not status(LIVE, READING).is_live
    assert not status(LIVE, error="x").is_live
    assert not status().is_live
    assert status(LIVE, READING).lag_rows == 3
    assert status(LIVE).to_json()["sinks"][0]["tables"][0]["phase"] == "live"


def test_lines_for_a_log_tell_what_changed() -> None:
    said = dict(news_of(status(READING)))
    assert said[("delta", "public.orders")] == (
        "reading",
        "delta: public.orders: reading, 1,000 of 4,000 rows, 500 rows/s, 6.0 s left",
    )
    assert said["capture"] == ("running", "capture: running")


def test_durations_are_for_people() -> None:
    assert [duration(seconds) for seconds in (0.04, 9.94, 12.3, 61, 3700)] == [
        "0.0 s",
        "9.9 s",
        "12 s",
        "1 min 1 s",
        "1 h 1 min",
    ]


def test_changes_per_second_are_those_of_the_last_seconds() -> None:
    clock = iter([0.0, 0.5, 1.0, 1.5, 9.0, 9.5])
    rates = Rates(lambda: next(clock))

    def after(rows: int) -> float | None:
        return rates.changes(status(LIVE, capture={"state": "running", "rows": rows}))

    assert after(0) is None
    assert [after(100), after(100), after(300)] == [200.0, 100.0, 200.0]
    assert after(300) == 0.0
    assert after(1) is None, "the capture has begun anew"
