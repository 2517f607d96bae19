"""What the process that plans a query loads when it starts: every start of every query waits for that."""

from __future__ import annotations

import subprocess
import sys

_PLANS = """
import sys
import headwater.backfill.loop, headwater.spark.jobs, headwater.sinks.parquet, headwater.sources.postgres.snapshots
print([name for name in ("pandas", "pydantic", "deltalake", "pyiceberg", "pymongo") if name in sys.modules])
"""


def test_planning_loads_neither_pandas_nor_pydantic_nor_what_other_sinks_and_sources_need() -> None:
    """Arrow loads pandas when the first value is made of a Python one: no module does that while it is imported."""
    done = subprocess.run([sys.executable, "-c", _PLANS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_archives_of_java_come_last_on_the_path_of_python() -> None:
    code = (
        "import sys; sys.path.insert(0, '/nowhere/spark-core.jar'); before = sys.path[1:]\n"
        "from headwater.spark.session import hot\n"
        "hot()\n"
        "assert sys.path == [*before, '/nowhere/spark-core.jar'], 'moved'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
