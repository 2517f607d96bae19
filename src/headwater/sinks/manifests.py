"""Manifests: which files a directory of Parquet files has, in the order in which batches brought them.

``_headwater/<number>.json`` is one commit: the files of a batch, or small files joined to larger ones, which they
replace; and, for every query that ever delivered here, how far it came. Numbers are given once
(:mod:`headwater.versioned.numbered_files`), so the newest manifest tells what is committed, and of two processes that
commit the same batch one finds that the other was faster.
Now and then a manifest has all files, so that those before it are not needed.

A file waits in ``_staging`` until its manifest is there, then it is moved to where everybody sees it; files that it
replaces are moved to ``_replaced`` before. Whoever comes next moves what a process that died left behind.
docs/formats/manifest.md has the format.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from headwater import failpoints
from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.manifest import Manifest, ManifestDamaged, ManifestFile
from headwater.system.files import make_private, sync
from headwater.versioned.numbered_files import NoLinks, NumberedFiles

DIRECTORY: Final = "_headwater"
STAGING: Final = "_staging"
REPLACED: Final = "_replaced"
CHECKPOINT_MANIFESTS: Final = 32
"""One in so many has all files."""
READ_ATTEMPTS: Final = 5

BEFORE_MANIFEST = failpoints.register("sink.parquet.before_manifest")
AFTER_MANIFEST = failpoints.register("sink.parquet.after_manifest")
BEFORE_HIDE = failpoints.register("sink.parquet.before_hide")
AFTER_HIDE = failpoints.register("sink.parquet.after_hide")
BEFORE_MOVE = failpoints.register("sink.parquet.before_move")
AFTER_MOVE = failpoints.register("sink.parquet.after_move")
BEFORE_FORGET = failpoints.register("sink.parquet.before_forget")
AFTER_FORGET = failpoints.register("sink.parquet.after_forget")


class Manifests:
    """The manifests of the directory *root* of one table. :param is_private: only this user can read them."""

    def __init__(self, root: Path, *, is_private: bool = False) -> None:
        self._root, self._is_private = root, is_private
        self._numbered = NumberedFiles(root / DIRECTORY, is_private=is_private)

    def newest(self) -> Manifest:
        """The newest one; number 0 if there is none. What its process did not move is moved."""
        before: Manifest | None = None
        while True:
            numbers = self._numbered.numbers()
            found = self._read(max(numbers)) if numbers else Manifest()
            try:
                self.settle(found)
                return found
            except ManifestDamaged:  # or others went on meanwhile, and replaced its files
                if found == before:
                    raise
                before = found

    def all(self) -> list[Manifest]:
        """Those from the newest on that has all files, in order.

        :raises ManifestDamaged: one is gone.
        """
        for _ in range(READ_ATTEMPTS):
            found: list[Manifest] = []
            try:
                for number in range(max(self._numbered.numbers(), default=0), 0, -1):
                    found.append(self._read(number))
                    if found[-1].all is not None:
                        break
                return found[::-1]
            except FileNotFoundError:  # forgotten while it was read: there is a newer one that has all
                continue
        raise ManifestDamaged(f"Manifests of {self._root} are gone.", next_step="Restore the directory _headwater.")

    def files(self) -> tuple[ManifestFile, ...]:
        """All committed files, in the order of their batches."""
        files: tuple[ManifestFile, ...] = ()
        for manifest in self.all():
            files = manifest.after(files) if manifest.all is None else manifest.all
        return files

    def place(self, file: ManifestFile) -> Path:
        """Where a committed file is now. :raises ManifestDamaged: it is gone."""
        names = [file.name, f"{REPLACED}/{file.name}", *([file.staged] if file.staged else [])]
        for _ in range(READ_ATTEMPTS):
            for name in names:
                if (self._root / name).exists():
                    return self._root / name
        raise ManifestDamaged(
            f"The file {file.name} is gone: it was removed, or joined to others longer ago than files are kept.",
            next_step="Read the directory again; if it is still missing, restore it.",
        )

    def put(self, manifest: Manifest) -> bool:
        """Commit; ``False``: its number is taken, and nothing is changed."""
        if manifest.all is None and manifest.number % CHECKPOINT_MANIFESTS == 0:
            manifest = self.complete(manifest)
        for parent in {(self._root / file.staged).parent for file in manifest.files}:
            if parent.exists():
                sync(parent)
        try:
            is_put = self._numbered.put(
                manifest.number,
                manifest.to_json(),
                lambda: failpoints.hit(BEFORE_MANIFEST),
                lambda following: self._read(following).parent in ("", manifest.id),
            )
        except NoLinks as error:
            raise SinkUnwritable(
                f"The file system of {self._root} makes no links: {error.strerror}.",
                next_step="Use another file system, or a Delta sink.",
            ) from error
        if is_put:
            failpoints.hit(AFTER_MANIFEST)
        return is_put

    def complete(self, manifest: Manifest) -> Manifest:
        """*manifest*, which is the next one, with all files."""
        before = [replace(file, staged="") for file in self.files()]
        return replace(manifest, all=manifest.after(before))

    def settle(self, manifest: Manifest) -> None:
        """Move what *manifest* replaces to where it is not seen, then its files to where they are.

        In this order, so that nobody who looks at the directory sees a row twice.
        """
        touched: set[Path] = set()
        for name in manifest.removed:
            failpoints.hit(BEFORE_HIDE)
            hidden = self._root / REPLACED / name
            if self._move(self._root / name, hidden):
                touched.add((self._root / name).parent)
                with suppress(FileNotFoundError):  # removed already
                    os.utime(hidden)  # it is kept from now on
            failpoints.hit(AFTER_HIDE)
        for directory in touched:
            sync(directory)
        touched = set()
        for file in manifest.files:
            failpoints.hit(BEFORE_MOVE)
            if self._move(self._root / file.staged, self._root / file.name):
                touched |= {(self._root / file.name).parent, self._root}
            else:
                self.place(file)
            failpoints.hit(AFTER_MOVE)
        for directory in touched:
            sync(directory)

    def forget(self, retention_seconds: float) -> None:
        """Remove what nobody needs who began to read less than *retention_seconds* ago. Nothing depends on it."""
        failpoints.hit(BEFORE_FORGET)
        before = time.time() - retention_seconds
        with suppress(FileNotFoundError):  # another process does the same
            for path in list((self._root / REPLACED).rglob("*.parquet")):
                if path.stat().st_mtime <= before:
                    path.unlink()
            is_needed = True
            for number in sorted(self._numbered.numbers(), reverse=True):
                path = self._numbered.path(number)
                if not is_needed:
                    path.unlink()
                elif path.stat().st_mtime <= before and self._read(number).all is not None:
                    is_needed = False
        failpoints.hit(AFTER_FORGET)

    def _read(self, number: int) -> Manifest:
        path = self._numbered.path(number)
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)

    def _move(self, old: Path, new: Path) -> bool:
        """``False``: it is not there."""
        for _ in range(2):
            try:
                old.rename(new)
                return True
            except FileNotFoundError:
                if not old.exists():
                    break
                if self._is_private:
                    make_private(new.parent)
                new.parent.mkdir(parents=True, exist_ok=True)
        return False
