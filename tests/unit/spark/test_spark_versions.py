"""Pipelines run on every PySpark from 3.5 on: what they import of it, and which versions are rejected at once."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import headwater
from headwater.demo.run import DemoOptions, run_demo
from headwater.spark.errors import SparkMissing, UnsupportedSpark
from headwater.spark.spark_version import check_spark

pytestmark = pytest.mark.unit

SOURCES = Path(headwater.__file__).parents[1]
OURS = re.compile(r"^\s*from (headwater[\w.]*) import ([\w, ]+|\([^)]*\))", re.MULTILINE)
COMMANDS = ("headwater.cli.run", "headwater.cli.demo", "headwater.cli.verify", "headwater.cli.upstream")
IN_SPARK_3_5 = {
    "pyspark": {"__file__", "__version__", "SparkConf", "SparkContext", "cloudpickle"},
    "pyspark.sql": {"SparkSession", "functions", "types"},
    "pyspark.sql.pandas.types": {"to_arrow_schema"},
    "pyspark.sql.types": {
        *("ArrayType", "BinaryType", "BooleanType", "ByteType", "DataType", "DateType", "DecimalType", "DoubleType"),
        *("FloatType", "IntegerType", "LongType", "MapType", "ShortType", "StringType", "StructField", "StructType"),
        *("TimestampNTZType", "TimestampType"),
    },
}
"""What pipelines use of PySpark, by module. Check that PySpark 3.5 has a name before you add it."""


def test_what_a_pipeline_imports_of_pyspark_is_in_3_5() -> None:
    waiting, seen = [*COMMANDS], set[str]()
    while waiting:
        module = waiting.pop()
        path = SOURCES.joinpath(*module.split("."))
        file = next(
            (file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None
        )
        if module in seen or file is None:
            continue
        seen.add(module)
        text = file.read_text()
        for imported, names in OURS.findall(text):
            waiting += [imported, *(f"{imported}.{name}" for name in re.findall(r"\w+", names))]
        if "pyspark" in text:
            for imported, name in _imports(ast.parse(text)):
                assert name in IN_SPARK_3_5.get(imported, ()), f"{module}: {imported}.{name}"
    assert "headwater.spark.jobs" in seen, "imports were followed"
    assert "headwater.spark.data_source_api" not in seen, "what a data source needs is in later versions only"


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What is taken of PySpark at run time: modules, and names in them."""
    aliases: dict[str, str] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            aliases |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pyspark":
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                yield str(node.module), each.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id, "")
            if module in ("pyspark", "pyspark.sql.types"):
                yield module, node.attr


# -- versions that are rejected ----------------------------------------------------------------------------------------


def installed(folder: Path, version: str) -> Path:
    """A folder with a PySpark of *version* that says so, and fails when it is imported."""
    package = folder / "pyspark"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise AssertionError("PySpark was imported")\n')
    (package / "version.py").write_text(f'# Generated.\n__version__: str = "{version}"\n')
    return folder


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of imports. No PySpark is imported yet, and none can be found."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    without = [entry for entry in sys.path if not Path(entry, "pyspark").exists()]
    monkeypatch.setattr(sys, "path", without)
    return without


@pytest.mark.parametrize("version", ["3.5.0", "3.5.2+vendor.1", "4.0.5", "4.10.0", "4.3.0.dev1"])
def test_versions_from_3_5_on_are_accepted(tmp_path: Path, path: list[str], version: str) -> None:
    path.insert(0, str(installed(tmp_path, version)))
    assert check_spark() == version


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.4.4", r"PySpark 3\.4\.4 is too old: Headwater needs 3\.5 or later"),
        ("2.4.8", "too old"),
        ("5.0.0", r"PySpark 5\.0\.0 is not supported"),
        ("main", "unknown"),
    ],
)
def test_other_versions_are_rejected(tmp_path: Path, path: list[str], version: str, reason: str) -> None:
    path.insert(0, str(installed(tmp_path, version)))
    with pytest.raises(UnsupportedSpark, match=reason):
        check_spark()


def test_a_pyspark_in_a_zip_file_has_a_version(tmp_path: Path, path: list[str]) -> None:
    archive = tmp_path / "pyspark.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for part in installed(tmp_path / "plain", "3.5.1").glob("pyspark/*"):
            file.write(part, f"pyspark/{part.name}")
    path.insert(0, str(archive))
    assert check_spark() == "3.5.1"


def test_without_pyspark_the_next_step_says_how_to_install_it(path: list[str]) -> None:
    with pytest.raises(SparkMissing, match=r"pip install 'headwater\[spark\]'"):
        check_spark()


def test_the_demo_rejects_a_version_before_it_starts_a_database(tmp_path: Path, path: list[str]) -> None:
    path.insert(0, str(installed(tmp_path / "old", "3.4.4")))
    folder = tmp_path / "demo"
    folder.mkdir()
    with pytest.raises(UnsupportedSpark, match="too old"):
        run_demo(folder, DemoOptions(), Mock())
    assert not list(folder.iterdir())


def test_a_run_rejects_a_version_within_a_second_before_java_starts(tmp_path: Path) -> None:
    """The bound is the feature. It is on processor time, with some to spare, because other processes slow this one."""
    settings = '[source]\ndsn = "postgresql://nobody@127.0.0.1:1/none"\ntables = ["t"]\n[[sink]]\nkind = "delta"\n'
    (tmp_path / "pipeline.toml").write_text(settings + 'path = "lake"\n')
    paths = os.pathsep.join([str(installed(tmp_path / "old", "3.4.4")), str(SOURCES)])
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "headwater.cli.main", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    assert done.returncode == 2, done.stderr
    assert "PySpark 3.4.4 is too old" in done.stderr
    assert "pip install 'pyspark>=3.5,<5'" in done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0
