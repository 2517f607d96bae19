"""TableFolder: the files of one versioned table: its manifests, its runs and its pins.

``manifests/<number>.json`` is one version (:mod:`headwater.versioned.numbered_files`). ``runs/`` has the runs of all
versions that are kept, and those of versions that may yet come. A version and what it alone needs goes
:data:`KEPT_SECONDS` after it was replaced.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.sources.target_names import chosen_component
from headwater.system.files import make_private, replace_file, sync
from headwater.versioned.errors import FolderUnwritable, TableBusy
from headwater.versioned.manifest import Manifest
from headwater.versioned.numbered_files import NoLinks, NumberedFiles
from headwater.versioned.run_file import RunInfo, RunReader

KEPT_SECONDS: Final = 300.0
ATTEMPTS: Final = 20
PROGRESS: Final = "progress.json"

BEFORE_MANIFEST = failpoints.register("versioned.before_manifest")
AFTER_MANIFEST = failpoints.register("versioned.after_manifest")
BEFORE_FORGET = failpoints.register("versioned.before_forget")
AFTER_FORGET = failpoints.register("versioned.after_forget")


class TableFolder:
    """The folder of the table *name* among the kept tables in *root*. It can be pickled; it holds nothing open."""

    def __init__(self, root: str | Path, name: str) -> None:
        self.root = Path(root)
        self.name = name
        self.path = self.root / chosen_component(name, self._has_directory)
        self._files = NumberedFiles(self.path / "manifests", is_private=True)
        self.runs = self.path / "runs"

    def _has_directory(self, name: str) -> bool:
        """Whether there is a directory of exactly this name, also where the file system ignores case."""
        return os.path.isdir(self.root / name) and name in os.listdir(self.root)  # noqa: PTH112, PTH208 - too long: no

    def newest(self) -> Manifest:
        """The newest version; number 0 if there is none."""
        while True:
            numbers = self._files.numbers()
            if not numbers:
                return Manifest()
            try:
                return self._read(max(numbers))
            except FileNotFoundError:  # forgotten meanwhile: there is a newer one
                continue

    def is_newest(self, number: int) -> bool:
        """Whether there is a version *number*, and no newer one."""
        return self._files.path(number).exists() and not self._files.path(number + 1).exists()

    def put(self, manifest: Manifest) -> bool:
        """Commit; ``False``: its number is taken, and nothing is changed. :raises FolderUnwritable: it cannot be."""
        if self.runs.exists():
            sync(self.runs)
        try:
            is_put = self._files.put(
                manifest.number,
                manifest.to_json(),
                lambda: failpoints.hit(BEFORE_MANIFEST),
                lambda following: self._read(following).parent == manifest.id,
            )
        except NoLinks as error:
            raise FolderUnwritable(
                f"The file system of {self.root} makes no links: {error.strerror}.",
                next_step="Keep the tables on another file system.",
            ) from error
        if is_put:
            failpoints.hit(AFTER_MANIFEST)
        return is_put

    def change(self, make: Callable[[Manifest], Manifest | None]) -> Manifest:
        """Put what *make* makes of the newest version, until nobody was faster; ``None`` leaves it as it is.

        :raises TableBusy: others are, all the time.
        """
        for _ in range(ATTEMPTS):
            newest = self.newest()
            made = make(newest)
            if made is None:
                return newest
            if self.put(made):
                return made
        raise TableBusy(
            f"Others changed the kept table {self.name} {ATTEMPTS} times in a row.",
            next_step="Look for another query that keeps the same table there.",
        )

    def progress(self) -> dict[str, Any]:
        """Of its history, for people."""
        try:
            told: dict[str, Any] = json.loads((self.path / PROGRESS).read_text())
            return told
        except (FileNotFoundError, ValueError):
            return {}

    def put_progress(self, told: Mapping[str, Any]) -> None:
        make_private(self.path)
        replace_file(self.path / PROGRESS, json.dumps(told))

    def open(self, run: RunInfo) -> RunReader:
        """:raises FileNotFoundError: it is gone: there is a newer version."""
        return RunReader(self.runs / run.name, run)

    def forget(self, kept_seconds: float = KEPT_SECONDS) -> None:
        """Remove what nobody needs who began to read less than *kept_seconds* ago. Nothing depends on it.

        Runs that no version names stay: somebody may be about to commit them (:meth:`remove_unnamed`).
        """
        failpoints.hit(BEFORE_FORGET)
        before = time.time() - kept_seconds
        numbers = sorted(self._files.numbers())
        try:  # the newest first: all that later versions have of these runs, it has
            kept = self._names(numbers[-1]) if numbers else set()
        except FileNotFoundError:
            return  # there is a newer one, and whoever put it there forgets
        gone: set[str] = set()
        for number, following in pairwise(numbers):
            with suppress(FileNotFoundError):
                names = self._names(number)
                if self._files.path(following).stat().st_mtime <= before:
                    gone |= names
                else:
                    kept |= names
        for name in gone - kept:
            (self.runs / name).unlink(missing_ok=True)
        for number, following in pairwise(numbers):
            with suppress(FileNotFoundError):  # the manifest goes last: it alone names its runs
                if self._files.path(following).stat().st_mtime <= before:
                    self._files.path(number).unlink()
        failpoints.hit(AFTER_FORGET)

    def remove_unnamed(self, chosen: Callable[[str], bool]) -> None:
        """Remove those runs that no version names and that are *chosen* by their names; and old drafts of manifests."""
        with suppress(FileNotFoundError):
            self._files.remove_drafts()
            numbers = self._files.numbers()
            named = self._names(max(numbers)) if numbers else set()  # if it is gone there is a newer one: not now
            for number in numbers:
                with suppress(FileNotFoundError):
                    named |= self._names(number)
            for path in list(self.runs.iterdir()):
                if path.name not in named and chosen(path.name):
                    path.unlink(missing_ok=True)

    def _names(self, number: int) -> set[str]:
        """The runs of a version."""
        return {run.name for run in self._read(number).runs}

    def _read(self, number: int) -> Manifest:
        path = self._files.path(number)
        return Manifest.from_json(path.read_text(encoding="utf-8"), path.name)
