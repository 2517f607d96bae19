"""`headwater journal` as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from headwater.journal.entry import Entry
from headwater.journal.fs_store import FsStore
from headwater.journal.run_log import RunLog


def test_the_command_follows_and_fails_like_a_command(tmp_path: Path) -> None:
    """A real process: entries as they come, a truncation told, Ctrl-C ends it, errors go to stderr with a next step."""
    root = tmp_path / "journal"
    with FsStore(root, durability="none") as store:
        log = RunLog.start(store, "shop")
        log.begin("schedule")
        log.record("barrier", {"epoch": 5})
        log.record("run_completed", {"interrupted": False})
    command = [str(Path(sys.executable).parent / "headwater"), "journal"]
    environment = {**os.environ, "HEADWATER_JOURNAL": str(root)}
    child = subprocess.Popen(
        [*command, "follow", log.segment, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert [json.loads(child.stdout.readline())["seq"] for _ in range(4)] == [1, 2, 3, 4]
    with FsStore(root) as store:
        store.append(log.session, log.segment, Entry("notice", {"text": "live"}))
        assert json.loads(child.stdout.readline())["fields"] == {"text": "live"}
        store.truncate(log.session, log.segment, 4)
        assert json.loads(child.stdout.readline()) == {"rewound_to": 4}
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 130
    wrong = subprocess.run([*command, "show", "zzz"], env=environment, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert wrong.stdout == ""
    assert "next: Run `headwater journal list`" in wrong.stderr
