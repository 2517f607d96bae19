"""The data source where tasks are other processes, through Spark Connect, and in a declarative pipeline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.postgres import Database

REPOSITORY = Path(__file__).parents[2]
needs_grpc = pytest.mark.skipif(
    importlib.util.find_spec("grpc") is None or importlib.util.find_spec("zstandard") is None,
    reason="needs pip install 'pyspark[pipelines]'",
)


def run(*command: str, folder: Path, **variables: str) -> str:
    """Run a command; what it printed."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable} | variables
    environment.pop("SPARK_REMOTE", None)
    for _ in range(3):
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if "Python worker failed to connect back" not in done.stderr:  # Spark gives a busy machine ten seconds
            break
    told = [line for line in (done.stdout + done.stderr).splitlines() if not line.lstrip().startswith("at ")]
    assert done.returncode == 0, "\n".join(told)
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    ["local-cluster[2,1,1024]", pytest.param("connect:local[2]", marks=[needs_grpc, pytest.mark.soak])],
    ids=["cluster", "connect"],
)
def test_rows_arrive_once_and_each_action_reads_anew_wherever_tasks_run(
    kind: str, newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t SELECT n, 'row' FROM generate_series(1, 500) n"
    )
    options = {"source": newest_postgres.dsn, "table": "t", "store": f"{tmp_path}/store", "splitRows": "100"}
    script = str(Path(__file__).with_name("masters.py"))
    told = run(sys.executable, script, kind, json.dumps(options), str(tmp_path), folder=tmp_path)
    found = json.loads(told.splitlines()[-1])
    assert found == {"rows": 500, "shown": 501, "streamed": 501, "delivered": 501, "written": 501}


def test_the_format_is_known_where_the_lookup_of_formats_fails(tmp_path: Path) -> None:
    (tmp_path / "pyspark_broken.py").write_text('raise RuntimeError("broken")')
    script = """
from headwater.spark.session import session
spark = session("local[1]")
try:
    spark.read.format("headwater").option("store", "none").option("table", "t").load()
except Exception as error:
    print(error)
"""
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    output = run(sys.executable, "-c", script, folder=tmp_path, PYTHONPATH=path)
    assert "DATA_SOURCE_NOT_FOUND" not in output
    assert "Start the stream that writes it" in output


@needs_grpc
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_example_of_a_declarative_pipeline_runs_and_goes_on(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, status text, total numeric(10,2))",
        "INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, 100) n",
    )
    example = tmp_path / "example"
    shutil.copytree(REPOSITORY / "examples" / "declarative_pipeline", example)
    settings = example / "spark-pipeline.yml"
    settings.write_text(settings.read_text().replace("file:///tmp/headwater-shop", f"file://{tmp_path}/storage"))
    data = {"HEADWATER_SOURCE": newest_postgres.dsn, "XDG_DATA_HOME": str(tmp_path / "data")}
    pipelines = str(Path(sys.executable).with_name("spark-pipelines"))
    command = (pipelines, "--conf", "spark.sql.catalogImplementation=hive", "run")
    run(*command, folder=example, **data)
    count = (
        "import pyarrow.dataset as d, sys; "
        "print(sum(d.dataset(f'spark-warehouse/{n}', format='parquet').count_rows() for n in sys.argv[1:]))"
    )
    assert run(sys.executable, "-c", count, "order_changes", "orders", folder=example).strip() == "200"
    newest_postgres.execute("DELETE FROM orders WHERE id <= 10")
    run(*command, folder=example, **data)
    assert run(sys.executable, "-c", count, "order_changes", folder=example).strip() == "110"
    assert run(sys.executable, "-c", count, "orders", folder=example).strip() == "90"
