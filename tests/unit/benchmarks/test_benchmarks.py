"""Every benchmark has the same options and the same JSON, and RESULTS.md has one run per table. No test is timed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
FIELDS = {"name", "value", "bound", "ratio", "goal", "better"}
FIGURE = {"name": "a / b", "value": 2.0, "bound": 1.0, "ratio": 2.0, "goal": 1.0, "better": "higher"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_takes_the_common_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--quick" in shown
    assert "--json" in shown


def test_only_one_module_imports_from_the_tests() -> None:
    """A benchmark is started as a script, without the root of the project on its path; that module puts it there."""
    users = [
        path.name for path in FOLDER.glob("*.py") if re.search(r"^\s*(from|import) tests\b", path.read_text(), re.M)
    ]
    assert users == ["_servers.py"]


def test_prints_the_fields_of_a_tiny_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from _harness import Figure, interleaved, main

    def measure(quick: bool) -> list[Figure]:
        assert quick
        value, bound = interleaved(1, lambda: sum(range(100)), lambda: sum(range(10)))
        return [
            Figure("sum / shorter sum", value, bound, None, "lower", "s", runs=1),
            Figure("missed / goal", 1.0, 2.0, 1.0, "higher"),
        ]

    monkeypatch.setattr(sys, "argv", ["tiny.py", "--quick", "--json"])
    with pytest.raises(SystemExit) as ended:
        main("Tiny.", measure)
    assert ended.value.code == 1  # a goal is missed
    figures = json.loads(capsys.readouterr().out)
    assert [set(figure) for figure in figures] == [FIELDS, FIELDS]
    assert figures[0]["name"] == "sum / shorter sum (one run)"
    assert figures[1] == {**FIGURE, "name": "missed / goal", "value": 1.0, "bound": 2.0, "ratio": 0.5}


def test_a_real_benchmark_prints_the_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import stream
    from _harness import main

    monkeypatch.setattr(sys, "argv", ["stream.py", "--json"])
    with pytest.raises(SystemExit):
        main(stream.__doc__, lambda quick: stream._hash_figures(1000, 1))
    figures = json.loads(capsys.readouterr().out)
    assert len(figures) > 5
    assert all(set(figure) == FIELDS for figure in figures)


def test_the_rate_leaves_out_the_first_batch() -> None:
    from _harness import Speed

    assert Speed.of_batches(10.0, [(15.0, 1000), (16.0, 300), (17.0, 500)]) == Speed(5.0, 400.0)
    assert Speed.of_sizes((100, 4.0), (1100, 6.0)) == Speed(4.0, 500.0)
    assert Speed.best([Speed(5.0, 400.0), Speed(4.0, 300.0)]) == Speed(4.0, 400.0)
    with pytest.raises(RuntimeError, match="a rate needs two"):
        Speed.of_batches(10.0, [(15.0, 1000)])
    with pytest.raises(RuntimeError, match="Run the benchmark again"):
        Speed.of_sizes((100, 6.0), (1100, 6.0))


def test_random_keys_reach_the_whole_table() -> None:
    from _backfill_writer import updated_rows

    rows, files, transactions_of_a_batch = 5_000_000, 19, 60
    keys = updated_rows(rows, span=rows, seed=1)
    touched = {(key - 1) * files // rows for _ in range(transactions_of_a_batch) for key in next(keys)}
    assert touched == set(range(files))
    recent = updated_rows(rows, span=500, seed=1)
    assert all(rows - 500 < key <= rows for _ in range(transactions_of_a_batch) for key in next(recent))
    assert next(updated_rows(rows, rows, seed=1)) == next(updated_rows(rows, rows, seed=1))


# -- RESULTS.md --------------------------------------------------------------------------------------------------------


def test_each_table_has_one_date_one_machine_and_one_command() -> None:
    import _results

    text = (FOLDER / "RESULTS.md").read_text()
    parts = _results.sections(text)
    assert set(parts) == set(BENCHMARKS)
    for name, section in parts.items():
        tables = section.count("| figure |")
        assert tables <= 1, name
        for fact in ("- Date: ", "- Machine: ", "- Command: "):
            assert section.count(fact) == tables, (name, fact)
    assert _results.merged(text, {}) == text


def test_a_new_run_replaces_its_whole_table_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _results

    old = {"journal": [{**FIGURE, "name": "old"}], "stream": [{**FIGURE, "name": "kept"}]}
    sections = {
        name: _results.section(name, figures, "2026-01-01", "old machine", f"benchmarks/{name}.py")
        for name, figures in old.items()
    }
    results = tmp_path / "RESULTS.md"
    results.write_text(_results.merged("", sections))

    def run(name: str, options: list[str]) -> list[dict[str, Any]]:
        return [{**FIGURE, "name": f"new {name}"}]

    monkeypatch.setattr(_results, "RESULTS", results)
    monkeypatch.setattr(_results, "run", run)
    monkeypatch.setattr(sys, "argv", ["_results.py", "--quick", "journal"])
    _results.main()
    written = _results.sections(results.read_text())
    assert written["stream"] == sections["stream"]
    assert "| new journal | 2 | 1 | 2 | ≥ 1 | met |" in written["journal"]
    assert "old" not in written["journal"]
    assert re.findall(r"Command: `(.*)`", written["journal"]) == [".venv/bin/python benchmarks/journal.py --quick"]


def test_an_unknown_benchmark_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import _results

    monkeypatch.setattr(sys, "argv", ["_results.py", "jurnal"])
    with pytest.raises(SystemExit):
        _results.main()
    assert "Unknown benchmark 'jurnal'" in capsys.readouterr().err
