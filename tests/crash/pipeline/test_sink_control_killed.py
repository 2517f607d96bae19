"""Processes that ask, or do what is asked of a sink, are killed between the durable steps: nothing is done twice."""

from __future__ import annotations

import multiprocessing
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from headwater import failpoints
from headwater.pipeline import sink_control
from headwater.pipeline.sink_control import DesiredState, SinkControl, SinkRequest, SinkRequestKind, ask_pipeline
from headwater.state import board, requests

pytestmark = pytest.mark.crash

_PROCESSES = multiprocessing.get_context("forkserver")


def drive(state: str, done: str, armed: str) -> None:
    """A driver that does what is asked until there is nothing."""
    failpoints.arm(armed)
    with closing(SinkControl(state)) as control:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            for request in control.requests():
                control.set_desired_state(request.detail["sink"], DesiredState.PAUSED)
                with Path(done).open("a") as file:
                    file.write("paused\n")
                control.answer(request, None, {"state": "paused"})


def send(state: str, answer: str, armed: str) -> None:
    failpoints.arm(armed)
    result = ask_pipeline(state, SinkRequest("delta", SinkRequestKind.PAUSE), 60)
    Path(answer).write_text(result["state"])


@pytest.mark.parametrize("step", [sink_control.AFTER_DESIRED, requests.BEFORE_REMOVE])
def test_a_driver_that_is_killed_has_done_what_it_answered_once(step: str, tmp_path: Path) -> None:
    state, done, answer = str(tmp_path / "state"), tmp_path / "done", tmp_path / "answer"
    sender = _PROCESSES.Process(target=send, args=(state, str(answer), ""))
    sender.start()
    try:
        while not board.open_board(state).list(requests.INBOX):
            assert sender.is_alive()
        killed = _PROCESSES.Process(target=drive, args=(state, str(done), f"{step}=kill"))
        killed.start()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
        with closing(SinkControl(state)) as control:
            assert control.desired_state("delta") is DesiredState.PAUSED
        drive(state, str(done), "")
        sender.join(60)
        assert (sender.exitcode, answer.read_text()) == (0, "paused")
        assert done.read_text() == "paused\n"
        assert not board.open_board(state).list(requests.INBOX)
    finally:
        sender.kill()


def test_a_request_survives_the_process_that_asks(tmp_path: Path) -> None:
    state, done = str(tmp_path / "state"), tmp_path / "done"
    sender = _PROCESSES.Process(target=send, args=(state, str(tmp_path / "answer"), f"{board.AFTER_CREATE}=kill"))
    sender.start()
    sender.join(60)
    assert sender.exitcode == -signal.SIGKILL
    drive(state, str(done), "")
    assert done.read_text() == "paused\n"
