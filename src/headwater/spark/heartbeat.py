"""Heartbeat: a file that a process touches while it answers, so that others see when it is frozen or hangs."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from headwater.private_files import FILE_MODE

BEAT_SUFFIX: Final = ".beat"
_BEAT_SECONDS: Final = 1.0
_CALL_SECONDS: Final = 2.0


class Heartbeat:
    """Touches *path* every second from its thread, until :meth:`close`; not while a call takes longer than 2 s.

    Each call is a ``with`` block, of one thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._called: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="headwater-heartbeat", daemon=True).start()

    def __enter__(self) -> None:
        self._called = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._called = None

    def _run(self) -> None:
        while True:
            called = self._called
            if called is None or time.monotonic() - called <= _CALL_SECONDS:
                with suppress(OSError):  # a full disk, for example: it is seen as not responding
                    self._path.touch(FILE_MODE)
            if self._ended.wait(_BEAT_SECONDS):
                return

    def close(self) -> None:
        self._ended.set()
