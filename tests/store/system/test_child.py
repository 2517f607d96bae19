"""Children: other Pythons or copies of this process, which get one line, report lines, and end with this process."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.system.child import Child, received, report
from headwater.system.process import status_fields

PYTHON = [
    "-c",
    "import os, signal, subprocess, sys\n"
    "from headwater.system.child import Child, die_with_parent, end_with_parent, received, report\n"
    "exec(sys.argv[1])",
]
SECONDS = 30
PARENT = """
child = Child(received()["python"], {})
child.line(30)
report({"pid": child.pid})
signal.pause()
"""


def main() -> None:
    """What the copies of this process, and the other Pythons beside them, do in these tests."""
    settings = received()
    try:
        os.fstat(settings["open"])
        has = True
    except OSError:
        has = False
    report({"pid": os.getpid(), "session": os.getsid(0), "word": settings["word"], "has": has})
    if settings["word"] == "fail":
        raise RuntimeError
    while os.read(0, 4096):
        pass


def wait_for_end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], SECONDS)[0]
    finally:
        os.close(process)


@pytest.fixture(params=[True, False], ids=["copy", "python"])
def child_and_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, int]]:
    monkeypatch.setattr(threading, "active_count", lambda: 1 if request.param else 2)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    kept, other = os.pipe()
    child = Child.of_module(__name__, {"word": "hello", "open": other}, forks=True)
    yield child, other
    child.close()
    os.close(kept)
    os.close(other)


def test_a_child_reports_and_ends_with_its_input(child_and_file: tuple[Child, int]) -> None:
    child, _ = child_and_file
    line = child.line(SECONDS)
    assert line == {"pid": child.pid, "session": child.pid, "word": "hello", "has": False}
    assert child.is_running
    child.close()
    assert not child.is_running


def test_a_copy_that_fails_says_nothing_more_and_ends() -> None:
    child = Child.of_module(__name__, {"word": "fail", "open": 999_999}, forks=True)
    assert child.line(SECONDS) is not None
    assert child.line(SECONDS) is None
    child.close()
    assert child.exit_code is not None


def test_a_child_that_is_stopped_ends_by_the_signal_and_one_that_fails_keeps_its_code() -> None:
    stopped = Child([*PYTHON, "report({}); signal.pause()"], {})
    assert stopped.line(SECONDS) == {}
    stopped.stop()
    assert stopped.exit_code == -signal.SIGTERM
    failed = Child([*PYTHON, "print('no JSON'); report({'a': 1}); sys.exit(3)"], {})
    assert list(failed.lines()) == [{"a": 1}]
    failed.close()
    assert failed.exit_code == 3


def test_a_child_that_ignores_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.system.child._END_SECONDS", 0.1)
    child = Child([*PYTHON, "signal.signal(signal.SIGTERM, signal.SIG_IGN); report({}); signal.pause()"], {})
    assert child.line(SECONDS) == {}
    child.stop()
    assert child.exit_code == -signal.SIGKILL


def test_settings_are_no_argument_and_the_log_is_private_and_goes_on(tmp_path: Path) -> None:
    log, variables = tmp_path / "log", {**os.environ, "WORD": "hello"}
    for _ in range(2):
        child = Child(
            [*PYTHON, "print(os.environ['WORD'], os.getcwd())"], log=log, folder=tmp_path, environment=variables
        )
        child.close()
    assert log.read_text() == f"hello {tmp_path}\n" * 2
    assert log.stat().st_mode & 0o077 == 0
    child = Child([*PYTHON, "print(received(), file=sys.stderr)"], {"password": "secret"}, log=log)
    assert b"secret" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    child.close()
    assert log.read_text().endswith("{'password': 'secret'}\n")


def test_all_that_a_child_has_started_ends_with_it() -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
report({"pid": other.pid})
signal.pause()
"""
    child = Child([*PYTHON, program], {})
    line = child.line(SECONDS)
    assert line is not None
    hurry = threading.Event()
    hurry.set()
    child.stop_all(SECONDS, hurry)
    assert child.exit_code == -signal.SIGKILL
    assert status_fields(line["pid"])[:1] in ([], ["Z"])


@pytest.mark.parametrize(
    "ends", ["die_with_parent(os.getppid())", "end_with_parent(lambda: os._exit(0))"], ids=["killed", "stopped"]
)
def test_a_child_ends_when_its_parent_is_killed(ends: str) -> None:
    parent = Child([*PYTHON, PARENT], {"python": [*PYTHON, f"received(); {ends}; report({{}}); signal.pause()"]})
    line = parent.line(SECONDS)
    assert line is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.close()
    wait_for_end(line["pid"])
