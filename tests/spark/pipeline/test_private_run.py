"""What a whole run leaves: no secret in any of it, and nothing of ours that another user can read or write.

One run with a umask of 0, a password in each place where one can be, and Spark's event log, which has all that its
UI shows.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline
from tests.spark.pipeline.leftovers import content, open_to_others, secrets_in

SECRETS = {
    "SOURCE_PASSWORD": "source~+/pass word",
    "SINK_PASSWORD": "sink~+/pass word",
    "OBJECT_STORE_KEY": "object~+/store key",
    "CATALOG_TOKEN": "catalog~+/token word",
    "SPARK_KEY": "spark~+/key word",
}
SINKS = """
storage_options = { aws_secret_access_key = "${OBJECT_STORE_KEY}" }
[[sink]]
kind = "postgres"
dsn = "${SINK_DSN}"
table = "mirror_{table}"
[[sink]]
kind = "iceberg"
warehouse = "ice"
catalog_options = { token = "file:${CATALOG_TOKEN_FILE}" }
[[sink]]
kind = "table"
[[sink]]
kind = "console"
path = "console.txt"
[spark.conf]
"spark.eventLog.enabled" = "true"
"spark.eventLog.dir" = "events"
"spark.eventLog.compress" = "false"
"spark.hadoop.fs.s3a.secret.key" = "${SPARK_KEY}"
"""


class SecretPipeline(RunningPipeline):
    """With the passwords in the environment, and one in a file elsewhere."""

    token_file: Path

    def _command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command(*arguments)
        server, name = self.database.server, self.database.name  # type: ignore[union-attr]
        return command, environment | SECRETS | {
            "CATALOG_TOKEN_FILE": str(self.token_file),
            "SHOP_DSN": server.dsn(name, user=f"{name}_reader", password=quote(SECRETS["SOURCE_PASSWORD"], safe="")),
            "SINK_DSN": server.dsn(name, user=f"{name}_writer", password=quote(SECRETS["SINK_PASSWORD"], safe="")),
        }


@pytest.fixture
def pipeline(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, newest_postgres: Database
) -> Iterator[SecretPipeline]:
    reader = newest_postgres.role("reader", "SUPERUSER REPLICATION")
    writer = newest_postgres.role("writer", "SUPERUSER")
    newest_postgres.execute(
        f"ALTER ROLE \"{reader}\" PASSWORD '{SECRETS['SOURCE_PASSWORD']}'",
        f"ALTER ROLE \"{writer}\" PASSWORD '{SECRETS['SINK_PASSWORD']}'",
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        "INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, 3000) n",
    )
    (tmp_path / "events").mkdir(0o700)
    sinks = SINKS.replace('"events"', f'"{tmp_path}/events"')
    made = SecretPipeline(tmp_path, newest_postgres, '["orders"]', sinks)
    made.token_file = tmp_path_factory.mktemp("secrets") / "token"
    made.token_file.write_text(SECRETS["CATALOG_TOKEN"])
    yield made
    made.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_leaves_no_secret_and_nothing_for_other_users(
    pipeline: SecretPipeline, newest_postgres: Database
) -> None:
    pipeline.start()
    pipeline.wait_for(lambda: pipeline.status().get("live"))
    newest_postgres.execute("INSERT INTO orders SELECT -n, 'new' FROM generate_series(1, 50) n")
    pipeline.wait_until_equal("public.orders")
    commands = b"\n".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pipeline.children())
    words = (("status",), ("status", "--json"), ("doctor",), ("doctor", "--json"))
    shown = [pipeline.headwater(*some).stdout.encode() for some in words]
    local = list(content(pipeline.folder))  # while Spark runs: it removes its local directories
    assert pipeline.stop() == 0, pipeline.complaints()

    found = chain(local, content(pipeline.folder), [("command lines", commands)], [("output", one) for one in shown])
    assert sorted({(where, name) for where, data in found for name in secrets_in(data, SECRETS)}) == []
    work = pipeline.folder / "headwater/shop"
    assert sorted(open_to_others(work)) == []
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert stat.S_IMODE((pipeline.folder / "lake/public.orders").stat().st_mode) == 0o777
    assert stat.S_IMODE(next((pipeline.folder / "lake").rglob("*.parquet")).stat().st_mode) & 0o666 == 0o666
