"""Failpoints: inert unless armed, exact when armed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headwater import failpoints
from headwater.errors import InputError


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_a_registered_failpoint_does_nothing_until_it_is_armed() -> None:
    name = failpoints.register("test.step")
    assert name in failpoints.registered()
    failpoints.hit(name)
    failpoints.arm("other.step=raise")
    failpoints.hit(name)
    failpoints.arm("test.step=raise")
    with pytest.raises(failpoints.FailpointError, match=r"test\.step"):
        failpoints.hit(name)


def test_a_count_waits_for_that_hit_and_fires_once() -> None:
    failpoints.arm("test.step=raise@3; test.slow=sleep:0.02")
    failpoints.hit("test.step")
    failpoints.hit("test.step")
    with pytest.raises(failpoints.FailpointError):
        failpoints.hit("test.step")
    failpoints.hit("test.step")
    before = time.monotonic()
    failpoints.hit("test.slow")
    failpoints.hit("test.slow")
    assert time.monotonic() - before >= 0.04


def test_kill_is_a_real_kill_and_the_environment_arms_it() -> None:
    script = "from headwater import failpoints; failpoints.hit('a.b'); print('alive'); failpoints.hit('a.b')"
    environment = os.environ | {failpoints.VARIABLE: "a.b=kill@2"}
    done = subprocess.run([sys.executable, "-uc", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "alive\n"


@pytest.mark.parametrize("text", ["a", "a=explode", "a=kill@x", "=;a=", "a=sleep:long"])
def test_what_cannot_be_understood_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"valid is|SECONDS"):
        failpoints.arm(text)
