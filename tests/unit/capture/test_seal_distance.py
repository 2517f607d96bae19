"""How long an epoch with rows waits for its seal."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.capture.options import CaptureOptions
from headwater.capture.session import CaptureSession


@pytest.mark.parametrize(
    ("sealing", "epoch", "longest"), [(0.0, 1.0, 1.0), (1.0, 1.0, 2.0), (300.0, 1.0, 5.0), (300.0, 9.0, 9.0)]
)
def test_one_slow_seal_does_not_hold_up_the_next_change(sealing: float, epoch: float, longest: float) -> None:
    session: Any = CaptureSession.__new__(CaptureSession)
    session._options = CaptureOptions(epoch_seconds=epoch)
    session._logs = SimpleNamespace(sealer=SimpleNamespace(seconds=sealing))
    session._sealed_at = time.monotonic() + 1000
    assert session._left() == pytest.approx(1000 + longest, abs=0.4)
