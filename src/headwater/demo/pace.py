"""How fast the shop of the demo writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

TRANSACTIONS_PER_SECOND: Final = 20


def paced(transaction: Callable[[], None], stop: threading.Event) -> int:
    """Do transactions until *stop*, at an even pace. How many were committed."""
    committed = 0
    due = time.monotonic()
    while not stop.wait(max(0.0, due - time.monotonic())):
        transaction()
        committed += 1
        due = max(due, time.monotonic() - 1.0) + 1 / TRANSACTIONS_PER_SECOND
    return committed
