"""How long a pipeline into Postgres takes from ``kill -9`` of its process to its first commit after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _backfill_table import Orders
from _backfill_writer import LiveWriter
from _servers import Database

_LOOK_SECONDS = 0.02
_WAIT_SECONDS = 300.0
_CHANGES_PER_SECOND = 200
_NEWEST = "SELECT coalesce(max(extract(epoch FROM pg_xact_commit_timestamp(xmin)))::float8, 0) FROM headwater.tokens"


def start_and_recovery(orders: Orders, target: Database, folder: Path) -> tuple[float, float]:
    """Seconds from the first start of a pipeline to its first commit; and from its kill to the next one."""
    folder.mkdir()
    (folder / "pipeline.toml").write_text(
        '[pipeline]\nname = "recovery"\n[source]\ndsn_env = "SOURCE_DSN"\n'
        f'tables = ["{orders.full_name}"]\nslot = "recovery"\npublication = "recovery"\n'
        '[spark]\nmaster = "local[2]"\n[[sink]]\nkind = "postgres"\ndsn = "${SINK_DSN}"\n'
    )
    with LiveWriter(orders, _CHANGES_PER_SECOND, folder, span=orders.rows):
        began = time.time()
        with _running(orders, target, folder) as first:
            started = _first_commit(first, target, began) - began
            _first_commit(first, target, time.time() + 1)
            killed = time.time()
            first.kill()
            first.wait()
        with _running(orders, target, folder) as second:
            return started, _first_commit(second, target, killed) - killed


@contextmanager
def _running(orders: Orders, target: Database, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"SOURCE_DSN": orders.database.dsn, "SINK_DSN": target.dsn}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater.cli.main", "run", "--json"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _first_commit(running: subprocess.Popen[bytes], target: Database, after: float) -> float:
    """When the sink committed first after a moment, by the server's clock, which is ours."""
    end = time.monotonic() + _WAIT_SECONDS
    with target.connect() as session:
        while time.monotonic() < end and running.poll() is None:
            there = session.execute("SELECT to_regclass('headwater.tokens') IS NOT NULL").fetchone()
            if there and there[0]:
                found = session.execute(_NEWEST).fetchone()
                if found and found[0] > after:
                    return float(found[0])
            time.sleep(_LOOK_SECONDS)
    raise RuntimeError(f"The sink committed nothing; the pipeline ended with {running.poll()}.")
