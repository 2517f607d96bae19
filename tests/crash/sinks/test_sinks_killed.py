"""Mirrors whose delivery is killed: at any step, and again and again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headwater.failpoints import registered

from . import deliveries
from .file_killed import OF_KIND, contents, killed_at_any_step, run


def test_a_delta_mirror_is_killed_at_any_step(tmp_path: Path) -> None:
    killed_at_any_step("delta", "mirror", tmp_path)


@pytest.mark.parametrize("epoch", sorted(deliveries.STEPS))
def test_the_batches_do_what_they_say(epoch: int, tmp_path: Path) -> None:
    assert run(deliveries.child, "delta", "mirror", str(tmp_path), "", epoch) == 0
    found = contents("delta", "mirror", tmp_path)
    assert {key: status for key, (status, _) in found.items()} == deliveries.STEPS[epoch]


@pytest.mark.soak
def test_killed_again_and_again(tmp_path: Path) -> None:
    hits = [name for name in sorted(registered()) if name.startswith(OF_KIND["delta"])]
    for name in hits:
        ended = run(deliveries.child, "delta", "mirror", str(tmp_path), f"{name}=kill@2", 0)
        assert ended in (-signal.SIGKILL, 0), name
    assert run(deliveries.child, "delta", "mirror", str(tmp_path), "", 0) == 0
    assert contents("delta", "mirror", tmp_path) == deliveries.MIRROR
