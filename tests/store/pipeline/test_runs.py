"""``headwater runs`` over journals that the writer of a pipeline's runs wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.control.request import user_name
from headwater.errors import InputError
from headwater.journal.entry import Entry
from headwater.journal.fs_store import FsStore
from headwater.pipeline import run_journal
from headwater.pipeline.config import PipelineConfig, load
from headwater.pipeline.run_journal import FOLDER, RunJournal, read_runs, run_entries
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER, make_folders
from headwater.pipeline.tables import CapturedTables, capture_settings
from headwater.spark.capture_child import CaptureKeeper
from headwater.spark.failure import Failure
from headwater.state.location import open_writer
from headwater.system.owner_lock import OwnerLock

pytestmark = pytest.mark.store
runner = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    (tmp_path / "pipeline.toml").write_text(
        '[pipeline]\nname = "shop"\n[source]\ndsn = "postgresql://app@127.0.0.1:1/shop"\ntables = ["public.orders"]\n'
        '[[sink]]\nkind = "delta"\npath = "lake"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load()
    make_folders(config)
    return config


def shown(*arguments: str) -> Any:
    result = runner.invoke(app, ["runs", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_completed(config: PipelineConfig) -> None:
    journal = RunJournal(config.work, config.name)
    journal.note("metric", {"sink": "delta", "epoch": 5, "batches": 1, "rows": 10})
    journal.command("pause_backfill", "ann@desk", {"table": "public.orders", "rows": None})
    journal.command("rewind_sink", "bob@desk", {"sink": "delta"}, "It has everything.")
    journal.note("metric", {"sink": "delta", "epoch": 6, "batches": 2, "rows": 30})
    journal.note("metric", {"sink": "sales", "epoch": 6, "batches": 1, "rows": 4})
    journal.end(None)


def write_failed(config: PipelineConfig) -> None:
    journal = RunJournal(config.work, config.name)
    journal.note("notice", {"part": "capture", "event": "capture_restarts", "error": "Gone", "text": "It went."})
    journal.note("notice", {"sink": "delta", "event": "sink_restarts", "error": "Away", "text": "It is away."})
    journal.note("notice", {"sink": "delta", "event": "sink_failed", "error": "Wrong", "text": "It is wrong."})
    journal.end("It is wrong.")


def test_a_pipeline_that_never_ran_has_no_runs(config: PipelineConfig) -> None:
    assert shown() == []
    assert "shop has never run" in runner.invoke(app, ["runs"]).stdout
    refused = runner.invoke(app, ["runs", "1"])
    assert refused.exception is not None
    assert "never run" in str(refused.exception)
    assert not (config.work / FOLDER).exists()


def test_runs_show_rows_restarts_errors_and_commands(config: PipelineConfig) -> None:
    write_completed(config)
    write_failed(config)
    first, second = shown()
    assert (first["number"], first["state"], first["started_by"]) == (1, "completed", user_name())
    assert (first["rows"], first["total_rows"]) == ({"delta": 30, "sales": 4}, 34)
    assert (first["restarts"], first["errors"]) == (0, [])
    assert first["begin_ms"] <= first["end_ms"] <= second["begin_ms"]
    pause, rewind = first["commands"]
    assert (pause["name"], pause["asked_by"], pause["detail"]["table"]) == (
        "pause_backfill",
        "ann@desk",
        "public.orders",
    )
    assert (rewind["asked_by"], rewind["problem"]) == ("bob@desk", "It has everything.")
    assert (second["state"], second["restarts"], second["commands"]) == ("failed", 2, [])
    assert [error["part"] for error in second["errors"]] == ["capture", "delta", "delta", "pipeline"]
    assert [error["text"] for error in second["errors"]] == ["It went.", "It is away.", "It is wrong.", "It is wrong."]
    assert shown("2") == second
    assert shown("--limit", "1") == [second]

    table = runner.invoke(app, ["runs"]).stdout
    assert "completed" in table
    assert "failed" in table
    one = runner.invoke(app, ["runs", "1"]).stdout
    assert "delta: 30 rows delivered" in one
    assert "pause_backfill(table=public.orders) by ann@desk" in one
    assert "rewind_sink(sink=delta) by bob@desk, refused: It has everything." in one
    assert "delta: It is wrong." in runner.invoke(app, ["runs", "2"]).stdout
    refused = runner.invoke(app, ["runs", "3"])
    assert "no run 3" in str(refused.exception)


def test_a_run_without_an_end_is_running_only_while_its_process_is(config: PipelineConfig) -> None:
    write_completed(config)
    journal = RunJournal(config.work, config.name)
    journal.note("metric", {"sink": "delta", "epoch": 7, "batches": 1, "rows": 3})
    with OwnerLock(config.work / RUN_FOLDER / LOCK_FILE, "shop"):
        assert [run["state"] for run in shown()] == ["completed", "running"]
    assert [run["state"] for run in shown()] == ["completed", "interrupted"]
    del journal  # its process died, and the kernel freed its locks
    write_completed(config)
    assert [run["state"] for run in shown()] == ["completed", "interrupted", "completed"]
    assert [run["total_rows"] for run in shown()] == [34, 3, 34]


def test_follow_prints_a_run_to_its_end_or_to_the_next_one(config: PipelineConfig) -> None:
    write_failed(config)
    RunJournal(config.work, config.name).note("notice", {"event": "x"})
    write_completed(config)
    kinds = [[entry.kind for entry in run_entries(config.work, run, follow=True)] for run in shown_runs(config)]
    assert kinds[0] == ["run_started", "notice", "notice", "notice", "run_failed"]
    assert kinds[1] == ["run_started", "notice"]
    assert kinds[2][-1] == "run_completed"
    lines = runner.invoke(app, ["runs", "1", "--follow", "--json"]).stdout.splitlines()
    assert [(json.loads(line)["run"], json.loads(line)["kind"]) for line in lines] == [(1, kind) for kind in kinds[0]]
    assert "It is away." in runner.invoke(app, ["runs", "1", "--follow"]).stdout


def shown_runs(config: PipelineConfig) -> list[run_journal.Run]:
    return read_runs(config.work, is_running=False)


@pytest.mark.timeout(120)
def test_follow_goes_on_with_the_next_run(config: PipelineConfig, tmp_path: Path) -> None:
    """A real process, over the end of a run, and over a new segment."""
    journal = RunJournal(config.work, config.name)
    command = [str(Path(sys.executable).parent / "headwater"), "runs", "--follow", "--json"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["kind"] == "run_started"
        journal.note("notice", {"event": "live"})
        assert json.loads(child.stdout.readline())["event"] == "live"
        journal.end(None)
        write_failed(config)
        lines = [json.loads(child.stdout.readline()) for _ in range(6)]
        assert [(line["run"], line["kind"]) for line in lines[:2]] == [(1, "run_completed"), (2, "run_started")]
        assert lines[-1]["kind"] == "run_failed"
    finally:
        child.kill()
        child.communicate()


def test_a_long_segment_is_compacted_when_a_run_starts(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    write_completed(config)
    monkeypatch.setattr(run_journal, "_LONG", 5)
    write_failed(config)
    write_completed(config)
    runs = shown_runs(config)
    assert [run.state for run in runs] == ["completed", "failed", "completed"]
    assert len({run.position.segment for run in runs}) == 3
    assert len({run.position.session for run in runs}) == 1


def test_entries_of_any_shape_do_not_hide_the_runs(config: PipelineConfig) -> None:
    write_completed(config)
    run = shown_runs(config)[0]
    with FsStore(config.work / FOLDER) as store:
        for kind in ("metric", "command", "notice", "run_failed", "other"):
            for fields in ({}, {"rows": "x"}, {"name": 5, "detail": [1]}, {"error": None, "event": 5}):
                store.append(run.position.session, run.position.segment, Entry(kind, fields))
    assert len(shown()) == 1
    assert runner.invoke(app, ["runs", "1"]).exit_code == 0


def raised(text: str) -> Failure:
    """A failure whose cause is an error of another library, which names a row."""
    try:
        try:
            float(text)
        except ValueError as error:
            raise InputError("The rows cannot be written.", next_step="Look.") from error
    except InputError as error:
        return Failure.of(error)
    raise AssertionError


def test_the_trace_of_a_run_has_the_frames_of_its_errors(config: PipelineConfig) -> None:
    for text in ("first row", "second row"):
        journal, failure = RunJournal(config.work, config.name), raised(text)
        fields = {"error": failure.kind, "text": str(failure), "trace": failure.trace}
        journal.note("notice", {"sink": "delta", "event": "sink_restarts"} | fields)
        journal.note("notice", {"event": "x"})
        journal.end(str(failure), failure.trace)
    restarted, ended = shown("1", "--trace")
    assert (restarted["part"], restarted["event"], restarted["error"]) == ("delta", "sink_restarts", "InputError")
    assert (ended["part"], ended["event"]) == ("pipeline", "run_failed")
    assert restarted["trace"] == ended["trace"]
    assert ", in raised" in ended["trace"]
    assert "ValueError\n" in ended["trace"]
    assert ended["trace"].endswith("InputError: The rows cannot be written. Look.")
    (first, second) = shown_runs(config)
    with FsStore(config.work / FOLDER) as store:
        entries = store.read_all(first.position.session, first.position.segment)
    assert entries[restarted["seq"] - 1].fields["event"] == "sink_restarts"
    assert not any("trace" in entry.fields for entry in entries)
    assert [trace["seq"] for trace in shown("--trace")] == [second.position.seq + 1, second.position.seq + 3]

    page = runner.invoke(app, ["runs", "1", "--trace"]).stdout
    assert "delta: sink_restarts" in page
    assert ", in raised" in page
    assert "first row" not in page
    refused = runner.invoke(app, ["runs", "--trace", "--follow"])
    assert isinstance(refused.exception, InputError)


def test_a_run_without_errors_has_no_traces(config: PipelineConfig) -> None:
    write_completed(config)
    assert shown("--trace") == []
    assert "no tracebacks" in runner.invoke(app, ["runs", "--trace"]).stdout


@pytest.mark.timeout(120)
def test_the_capture_hands_its_traceback_over(config: PipelineConfig) -> None:
    """A real process, whose store another one writes."""
    journal, noted = RunJournal(config.work, config.name), threading.Event()

    def note(kind: str, fields: Mapping[str, Any]) -> None:
        journal.note(kind, fields)
        noted.set()

    settings = partial(capture_settings, config, ("public.orders",), CapturedTables(config.store))
    keeper = CaptureKeeper(settings, log=config.logs / "capture.log", note=note)
    with open_writer(config.store):
        while not noted.wait(0.05):
            keeper.step()
    keeper.stop()
    journal.end(None)
    (trace,) = shown("--trace")
    assert (trace["part"], trace["event"], trace["error"]) == ("capture", "capture_restarts", "StoreOwned")
    assert "capture_child.py" in trace["trace"]
    assert ", in open_writer" in trace["trace"]


def test_prune_leaves_the_session_of_a_run_alone_until_it_ends(config: PipelineConfig) -> None:
    journal = RunJournal(config.work, config.name)
    prune = ["journal", "prune", "--root", str(config.work / FOLDER), "--older-than", "0", "--delete", "--json"]

    def verdict() -> str:
        (judged,) = json.loads(runner.invoke(app, prune).stdout)
        return str(judged["verdict"])

    assert verdict() == "owned"
    assert len(shown()) == 1
    journal.end(None)
    assert verdict() == "deleted"
    assert shown() == []


def test_a_journal_that_cannot_be_written_stops_nothing(config: PipelineConfig) -> None:
    (config.work / FOLDER).write_text("in the way")
    journal = RunJournal(config.work, config.name)
    journal.note("notice", {"event": "x"})
    journal.end(None)
