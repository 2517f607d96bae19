"""Chores: long work on the logs of a running capture, a few epochs with each seal, because somebody asked for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headwater.control.command import CompactLog, MigrateLog
from headwater.control.request import Answers
from headwater.errors import PASSING, HeadwaterError
from headwater.log_store import KvLogStoreFactory
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import WriteBatch

EPOCHS_AT_ONCE = 8
ROWS_AT_ONCE = 100_000


class Chores:
    """The chores of one session. What was not finished is asked for again in the next one, and goes on."""

    def __init__(self, factory: KvLogStoreFactory, answers: Answers) -> None:
        self._factory = factory
        self._answers = answers
        self._under_way: dict[str, Migration | Compaction] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, request: str, command: MigrateLog | CompactLog) -> None:
        """Begin what the request with this id asks. :raises LogNotFound: no such log."""
        if request not in self._under_way:
            kind = Migration if isinstance(command, MigrateLog) else Compaction
            self._under_way[request] = kind(self._factory, command.log)

    def step(self, batch: WriteBatch) -> None:
        """A little of each, for the seal that comes next; what is done is answered with it."""
        for request, chore in list(self._under_way.items()):
            try:
                if isinstance(chore, Migration):
                    done, result = chore.step(EPOCHS_AT_ONCE), asdict(chore.progress)
                else:
                    done, result = chore.step(ROWS_AT_ONCE), asdict(chore.saved)
            except PASSING:
                raise
            except HeadwaterError as error:
                self._end(batch, request, error, {})
                continue
            if done:
                self._end(batch, request, None, result)

    def _end(self, batch: WriteBatch, request: str, error: HeadwaterError | None, result: dict[str, Any]) -> None:
        del self._under_way[request]
        self._answers.put(batch, request, error, result)
