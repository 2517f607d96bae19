"""Debug records beside the log: best effort, size-capped, rotated; they can never hurt the log.

Traces live in their own directory, under their own lock, without any sync. Whatever goes wrong is logged once per
segment and the record is dropped. A trace without a log is possible and makes no session or segment
appear in a listing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from fcntl import LOCK_EX
from pathlib import Path
from typing import Any

from headwater.journal import files

_log = logging.getLogger(__name__)
_PATIENCE = 0.1  # seconds for another process that writes the same trace; a record is not worth more


class TraceFiles:
    """`{root}/{session}/{segment}.jsonl`, with `.1.jsonl` … `.{keep}.jsonl` older."""

    def __init__(self, root: Path, *, max_bytes: int = 8 << 20, keep: int = 2) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._keep = keep
        self._warned: set[str] = set()

    def _path(self, session: str, segment: str, number: int = 0) -> Path:
        return self._root / session / (f"{segment}.{number}.jsonl" if number else f"{segment}.jsonl")

    def append(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        """Write *record*; False when it was dropped."""
        try:
            text = json.dumps({"ts": time.time_ns() // 1_000_000, **record}, ensure_ascii=False, separators=(",", ":"))
            data = text.encode(errors="replace") + b"\n"
            self._write(session, segment, data)
        except Exception as error:  # best effort is the contract: nothing may reach the caller
            if segment not in self._warned:
                self._warned.add(segment)
                _log.warning("trace of segment %s dropped: %s", segment, type(error).__name__)
            return False
        return True

    def _write(self, session: str, segment: str, data: bytes) -> None:
        path = self._path(session, segment)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(100):
            try:
                fd = os.open(path, flags, 0o600)
            except FileNotFoundError:
                files.make_directory(path.parent)
                continue
            try:
                files.take(fd, LOCK_EX, path, _PATIENCE)
                status = os.fstat(fd)
                if status.st_nlink == 0 or status.st_ino != path.stat().st_ino:
                    continue  # rotated by another process meanwhile
                if status.st_size and status.st_size + len(data) > self._max_bytes:
                    self._rotate(session, segment)
                    continue
                os.write(fd, data)
                return
            except FileNotFoundError:
                continue
            finally:
                os.close(fd)
        raise OSError("the trace file kept changing")

    def _rotate(self, session: str, segment: str) -> None:
        for number in range(self._keep, 0, -1):
            older = self._path(session, segment, number - 1)
            if older.exists():
                older.replace(self._path(session, segment, number))

    def iter(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        """What is kept, oldest first; lines that cannot be read are left out."""
        for number in range(self._keep, -1, -1):
            try:
                data = self._path(session, segment, number).read_bytes()
            except OSError:
                continue
            for line in data.split(b"\n"):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record

    def remove_session(self, session: str) -> None:
        """Forget all traces of a session."""
        shutil.rmtree(self._root / session, ignore_errors=True)
