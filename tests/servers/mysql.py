"""Real MySQL servers for tests: as :mod:`tests.servers.mariadb`, with the loader that came with the server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.servers.binaries import mysql_root
from tests.servers.mariadb import MariaDbServer


class MySqlServer(MariaDbServer):
    """One server process. :param settings: over those of this module, as options of ``mysqld``."""

    kind = "MySQL"

    @staticmethod
    def _find_root() -> Path:
        return mysql_root()

    @property
    def _own_settings(self) -> dict[str, str]:
        return {
            "basedir": str(self._root / "usr"),
            "lc-messages-dir": str(self._root / "usr/share/mysql"),
            "plugin-dir": str(self._root / "usr/lib/mysql/plugin"),
            "secure-file-priv": "NULL",
            "mysqlx": "OFF",
            "performance-schema": "OFF",
        }

    @property
    def _program(self) -> list[str]:
        loader = next(self._root.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*"))
        return [str(loader), "--library-path", str(loader.parent), str(self._root / "usr/sbin/mysqld")]

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TZ": "UTC", "TMPDIR": self._tmp}

    def _make_data(self) -> None:
        self.data.mkdir()
        settings = {**self._own_settings, "datadir": str(self.data), "lower-case-table-names": "0"}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        if os.geteuid() == 0:
            arguments.append("--user=root")
        made = subprocess.run(
            [*self._program, "--no-defaults", "--initialize-insecure", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise RuntimeError(f"MySQL's data directory was not made:\n{(made.stdout + made.stderr)[-4000:]}")
