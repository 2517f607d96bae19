"""NumberedFiles: commits of one directory: ``<number>.json``, numbers from 1 on without gaps, each given once.

A file is written and synced under another name, then linked to its own, which fails if that is taken: of two processes
that commit the same number one finds that the other was faster. A number that was given, and whose file was forgotten
since, could be given again; whoever does so finds a later file that does not lead on from its own, and takes it back.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headwater.system.files import make_private, open_private, sync

DRAFT_SECONDS: Final = 60.0


class NoLinks(OSError):
    """The file system makes no links."""


class NumberedFiles:
    """The files of *directory*. It can be pickled; it holds nothing open.

    :param is_private: only this user can read them; otherwise the umask decides.
    """

    def __init__(self, directory: Path, *, is_private: bool = False) -> None:
        self._directory, self._is_private = directory, is_private

    def numbers(self) -> list[int]:
        """Those that are there, in no order."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return []
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]

    def path(self, number: int) -> Path:
        return self._directory / f"{number:020}.json"

    def put(self, number: int, text: str, before: Callable[[], None], leads_on: Callable[[int], bool]) -> bool:
        """Commit *text*, durable on return; ``False``: the number is taken, and nothing is changed.

        :param before: called when all is written and nothing committed.
        :param leads_on: whether the file of a number, which is the next one, was made after this one.
        :raises NoLinks: the file system makes none.
        """
        if self._is_private:
            make_private(self._directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        draft = self._directory / f".{uuid.uuid4()}.draft"
        create = open_private if self._is_private else Path.open
        with create(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        before()
        try:
            os.link(draft, self.path(number))
        except FileExistsError:
            return False
        except OSError as error:
            raise NoLinks(error.errno, error.strerror) from error
        finally:
            draft.unlink()
        sync(self._directory)
        if any(later > number for later in self.numbers()) and not self._leads_on(number + 1, leads_on):
            self.path(number).unlink()
            return False
        return True

    @staticmethod
    def _leads_on(number: int, leads_on: Callable[[int], bool]) -> bool:
        try:
            return leads_on(number)
        except FileNotFoundError:
            return False

    def remove_drafts(self) -> None:
        """Remove what processes that died have left. Nothing depends on it."""
        for path in list(self._directory.glob(".*.draft")):
            if path.stat().st_mtime < time.time() - DRAFT_SECONDS:
                path.unlink(missing_ok=True)
