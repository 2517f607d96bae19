"""What a run leaves behind: its files, the secrets in them, and what other users can read of it."""

from __future__ import annotations

import base64
import gzip
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

BY_SPARK = ("spark",)
"""Directories whose files Spark creates; they are private themselves."""


def content(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files in *folder* by name, and the members of archives; not pipeline.toml. Files can be removed meanwhile."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "pipeline.toml":
            try:
                yield str(path.relative_to(folder)), path.read_bytes()
                if path.suffix == ".gz":
                    yield str(path), gzip.decompress(path.read_bytes())
                if zipfile.is_zipfile(path):
                    with zipfile.ZipFile(path) as archive:
                        for member in archive.namelist():
                            yield f"{path}/{member}", archive.read(member)
            except FileNotFoundError:
                continue


def secrets_in(data: bytes, secrets: Mapping[str, str]) -> Iterator[str]:
    """The names of the *secrets* in *data*: plain, URL-encoded, in JSON, or in base64 of something longer."""
    for name, secret in secrets.items():
        forms = [secret.encode(), quote(secret, safe="").encode(), quote(secret).encode()]
        forms.append(secret.replace("/", "\\/").encode())
        if any(form in data for form in (*forms, *_in_base64(forms[0]), *_in_base64(forms[1]))):
            yield name


def _in_base64(form: bytes) -> Iterator[bytes]:
    """*form* as it is in the base64 of a longer text: what does not depend on its neighbours."""
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + form)
        known = encoded[(0, 2, 3)[shift] : (shift + len(form)) // 3 * 4]
        yield known
        yield known.translate(bytes.maketrans(b"+/", b"-_"))


def open_to_others(root: Path) -> Iterator[str]:
    """The files and directories in *root* that are not 0600 and 0700. Spark's are not looked at."""
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not (Path(directory) == root and name in BY_SPARK)]
        for name in (*names, *files):
            path = Path(directory, name)
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode != (0o700 if path.is_dir() else 0o600):
                yield f"{path.relative_to(root)} {mode:04o}"
