"""Build hook: compiles the helpers of the hot paths where there is a C compiler; without one, Python does it all."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "src/headwater/_stop_watch.c",
    "src/headwater/sources/mongodb/documents/_documents.c",
    "src/headwater/sources/mysql/_rows.c",
    "src/headwater/sources/mysql/binlog/_row_decoder.c",
    "src/headwater/sources/postgres/_binary.c",
    "src/headwater/sources/postgres/_decoder.c",
    "src/headwater/sources/postgres/_receive.c",
    "src/headwater/sources/sqlserver/_tds_rows.c",
    "src/headwater/stream/_gather.c",
)


class ExtensionBuildHook(BuildHookInterface):  # type: ignore[misc]
    """A library lands beside its source, so an editable install finds it, too; a wheel is then of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for name in SOURCES:
            self._build(Path(self.root, name), version, build_data)

    def _build(self, source: Path, version: str, build_data: dict[str, Any]) -> None:
        library = source.with_name(source.stem + str(sysconfig.get_config_var("EXT_SUFFIX")))
        reason = (
            "HEADWATER_NO_EXTENSION is set" if os.environ.get("HEADWATER_NO_EXTENSION") else _compile(source, library)
        )
        if reason is not None:
            library.unlink(missing_ok=True)
            self.app.display_warning(f"headwater: {source.name} was not compiled, Python will do its work: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"][str(library)] = str(library.relative_to(Path(self.root, "src")))

    def clean(self, versions: list[str]) -> None:
        for name in SOURCES:
            source = Path(self.root, name)
            for library in source.parent.glob(f"{source.stem}.*.so"):
                library.unlink()


def _compile(source: Path, library: Path) -> str | None:
    """Why it could not be compiled, or ``None``."""
    compiler = shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))
    flags = ["-O3", "-fPIC", "-shared", "-fno-strict-aliasing", "-fvisibility=hidden", "-Wall", "-Wextra"]
    include = f"-I{sysconfig.get_paths()['include']}"
    made = library.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler, *flags, include, str(source), "-o", str(made)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or [f"{compiler[0]} failed"]
            return lines[0]
        made.replace(library)  # a process that runs has the old one open
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        made.unlink(missing_ok=True)
    return None
