"""The settings of a session, and what it needs of the machine. Nothing here starts a Java."""

from __future__ import annotations

import gc
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from headwater.spark import class_archive, session, spark_home
from headwater.spark.errors import JavaMissing
from headwater.spark.java import Java, find_java

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has started nothing yet; the user's cache directory."""
    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", "python-of-the-user")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headwater"


def options_of(builder: SparkSession.Builder, **told: object) -> dict[str, str]:
    return dict(session.tuned(builder, **told)._options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyspark leaves a pipe open
def test_a_secret_setting_is_not_on_the_command_line_of_java(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fresh / "home"
    (home / "bin").mkdir(parents=True)
    submit = home / "bin/spark-submit"
    submit.write_text(f'#!/bin/sh\necho "$@" > "{home}/command"\nexit 1\n')
    submit.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(home))
    for name in ("_active_spark_context", "_jvm"):
        monkeypatch.setattr(SparkContext, name, None)
    settings = {"spark.hadoop.fs.s3a.secret.key": "hidden", "spark.app.note": "shown"}
    with pytest.raises(PySparkRuntimeError, match="JAVA_GATEWAY_EXITED"):
        session.session("local", config=settings)
    command = (home / "command").read_text()
    assert "spark.app.note=shown" in command
    assert "hidden" not in command
    gc.collect()


def test_what_was_set_before_stays(fresh: Path) -> None:
    builder = SparkSession.Builder().master("local[2]").config("spark.sql.session.timeZone", "Europe/Vienna")
    made = options_of(builder)
    assert made["spark.sql.session.timeZone"] == "Europe/Vienna"
    assert made["spark.python.unix.domain.socket.enabled"] == "true"


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (None, False),
        ("/data/checkpoints", True),
        (Path("/data/checkpoints"), True),
        ("file:///data/checkpoints", True),
        ("s3a://bucket/checkpoints", False),
        ("hdfs://name/checkpoints", False),
        ("dbfs:/checkpoints", False),
    ],
)
def test_checkpoints_by_rename_only_on_a_local_disk(fresh: Path, place: str | Path | None, expected: bool) -> None:
    assert (MANAGER in options_of(SparkSession.Builder().master("local"), checkpoints=place)) is expected


def test_workers_import_pyspark_as_it_is_installed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = spark_home.linked_home()
    assert home is not None
    assert home.parent == fresh
    assert (home / "bin" / "spark-submit").is_file()
    assert not (home / "python").exists()
    assert spark_home.linked_home() == home, "made once"
    monkeypatch.setattr(pyspark, "__version__", "5.0.0")
    assert spark_home.linked_home() is None, "not tried with this version"


def test_a_spark_home_of_the_user_stays(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    options_of(SparkSession.Builder().master("local"))
    assert not fresh.exists()


def test_a_cluster_gets_no_settings_of_this_machine(fresh: Path) -> None:
    made = options_of(SparkSession.Builder().master("spark://host:7077"))
    assert "spark.driver.host" not in made
    assert not fresh.exists()


def test_an_archive_is_used_when_it_fits_and_never_otherwise(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(class_archive.OFF, raising=False)
    home, java = spark_home.linked_home(), find_java()
    assert home is not None
    assert class_archive.archive_options(java, home) == ""
    path = class_archive.archive_path(java, home)
    path.write_bytes(b"classes")
    assert str(path) in class_archive.archive_options(java, home)
    assert class_archive.archive_options(Java(java.command, java.version, "another build"), home) == ""
    assert class_archive.archive_options(java, Path("/nowhere")) == ""
    monkeypatch.setenv(class_archive.OFF, "off")
    assert class_archive.archive_options(java, home) == ""


def test_arrow_is_not_checked_twice_unless_java_has_options_of_the_user(fresh: Path) -> None:
    name = "spark.driver.extraJavaOptions"
    assert options_of(SparkSession.Builder().master("local"))[name].startswith(session.ARROW_OPTIONS)
    assert options_of(SparkSession.Builder().master("local").config(name, "-Dmine=1"))[name] == "-Dmine=1"


def test_an_archive_that_cannot_be_made_is_no_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "_WARM_UP", "raise SystemExit(1)")
    assert session.prepare() is False
    assert not list(fresh.glob("*.jsa"))


def test_without_java_the_next_step_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match=r"none on the path.*apt-get install openjdk-17"):
        session.tuned(SparkSession.Builder().master("local"))
    old = tmp_path / "old"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").touch()
    (old / "release").write_text('JAVA_VERSION="11.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(old))
    with pytest.raises(JavaMissing, match="is 11"):
        find_java()


def test_what_is_loaded_is_garbage_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_calls", 0)
    before = gc.get_freeze_count()
    try:
        session.hot()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
