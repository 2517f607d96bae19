"""The settings of a session, and what it needs of the machine. Nothing here starts a Spark."""

from __future__ import annotations

import fcntl
import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile
from zipimport import zipimporter

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from headwater.spark import class_archive, directories, session
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
    home = fake_spark(fresh, monkeypatch, 'echo "$@" > command; exit 1')
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
    home = session.linked_home()
    assert home is not None
    assert home.parent == fresh
    assert (home / "bin" / "spark-submit").is_file()
    assert not (home / "python").exists()
    assert session.linked_home() == home, "made once"
    monkeypatch.setattr(pyspark, "__version__", "5.0.0")
    assert session.linked_home() is None, "not tried with this version"


def test_a_spark_home_of_the_user_stays(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    options_of(SparkSession.Builder().master("local"))
    assert not fresh.exists()


def test_a_cluster_gets_no_settings_of_this_machine(fresh: Path) -> None:
    made = options_of(SparkSession.Builder().master("spark://host:7077"))
    assert "spark.driver.host" not in made
    assert not fresh.exists()


def archive_of(home: Path, content: bytes) -> Path:
    """A file in the place of the archive for the Spark at *home*."""
    path = directories.cache_directory() / f"{class_archive._stem(find_java(), home)}-{len(content)}.jsa"
    path.write_bytes(content)
    return path


def test_an_archive_is_used_when_it_fits_and_never_otherwise(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(class_archive.OFF, raising=False)
    home, java = session.linked_home(), find_java()
    assert home is not None
    assert class_archive.archive_options(java, home) == ""
    path = archive_of(home, b"classes")
    assert str(path) in class_archive.archive_options(java, home)
    assert class_archive.archive_options(Java(java.command, java.version, "another build"), home) == ""
    assert class_archive.archive_options(java, Path("/nowhere")) == ""
    assert session.prepare_in_background() is None, "there is one"
    monkeypatch.setenv(class_archive.OFF, "off")
    assert class_archive.archive_options(java, home) == ""
    path.unlink()
    assert session.prepare_in_background() is None, "switched off"
    monkeypatch.delenv(class_archive.OFF)
    settings = fresh / "settings"
    settings.mkdir()
    (settings / "spark-defaults.conf").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(settings))
    assert session.prepare_in_background() is None, "Java cannot create one"


def test_a_damaged_archive_does_not_break_java(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(class_archive.OFF, raising=False)
    home, java = session.linked_home(), find_java()
    assert home is not None
    path = archive_of(home, b"no classes at all" * 1000)
    options = class_archive.archive_options(java, home).split()
    assert any(str(path) in option for option in options)
    done = subprocess.run([java.command, *options, "-version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with path.open("r+b") as file:
        file.truncate(100)
    assert class_archive.archive_options(java, home) == "", "Java would end with a signal"


def fake_spark(fresh: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A SPARK_HOME whose Spark is *script*."""
    home = fresh / "home"
    for part in ("bin", "jars"):
        (home / part).mkdir(parents=True)
    submit = home / "bin/spark-submit"
    submit.write_text(f"#!/bin/sh\ncd {home}\n{script}\n")
    submit.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(home))
    return home


def test_one_process_at_a_time_creates_an_archive(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_spark(fresh, monkeypatch, "touch started; exit 1")
    with (fresh / class_archive._LOCK_FILE).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert session.prepare() is False
    assert not (home / "started").exists()
    assert session.prepare() is False, "this Spark cannot create one"
    assert (home / "started").exists()
    assert not list(fresh.glob("*.jsa"))
    archive_of(home, b"classes")
    (home / "started").unlink()
    assert session.prepare() is True
    assert not (home / "started").exists(), "created once"


def test_arrow_is_not_checked_twice_unless_java_has_options_of_the_user(fresh: Path) -> None:
    name = "spark.driver.extraJavaOptions"
    assert options_of(SparkSession.Builder().master("local"))[name].startswith(session.ARROW_OPTIONS)
    assert options_of(SparkSession.Builder().master("local").config(name, "-Dmine=1"))[name] == "-Dmine=1"


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


def test_importers_of_archives_do_not_outlive_a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "sent_along.zip"
    with ZipFile(archive, "w") as file:
        file.writestr("sent_along_first.py", "value = 1")
        file.writestr("sent_along_second.py", "value = 2")
    monkeypatch.syspath_prepend(archive)
    monkeypatch.setattr(session, "_calls", max(session._FROZEN_AT))
    assert import_module("sent_along_first").value == 1
    assert str(archive) in sys.path_importer_cache
    session.hot()
    assert not [each for each in sys.path_importer_cache.values() if isinstance(each, zipimporter)]
    assert import_module("sent_along_second").value == 2, "what is in it can still be imported"


@pytest.mark.parametrize(("version", "package"), [("3.5.9", ""), ("4.0.5", ""), ("4.1.4", ".checkpointing")])
def test_checkpoint_files_are_written_by_a_class_that_the_version_has(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, version: str, package: str
) -> None:
    monkeypatch.setattr(session, "installed_spark", lambda: version)
    made = options_of(SparkSession.Builder().master("local"), checkpoints="/data")[MANAGER]
    assert made == f"org.apache.spark.sql.execution.streaming{package}.FileSystemBasedCheckpointFileManager"
