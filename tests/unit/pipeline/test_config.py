"""The settings of a pipeline: what is refused says where, what is valid, and never a password."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from headwater import Pipeline
from headwater.capture import CaptureOptions
from headwater.pipeline.config import PipelineConfig, SinkSection, configure, is_pattern, load, matching
from headwater.pipeline.errors import ConfigError, ConfigNotFound
from headwater.pipeline.toml_text import line_of, with_table
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Mode
from headwater.sources.dsn import DsnUnreadable, current_dsn, reread
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.postgres.connection import Dsn
from headwater.sources.splits import SplitKind
from headwater.sources.table import SpecialValues

SMALLEST = """\
[source]
dsn = "postgresql://app@db/shop"
tables = ["public.orders"]

[[sink]]
kind = "delta"
path = "lake"
"""
WHOLE = """\
[pipeline]
name = "shop"
store = "/var/lib/shop"

[source]
dsn = "postgresql://app:${HEADWATER_TEST_WORD}@db/shop"
tables = ["public.orders", "sales.*"]
slot = "shop_slot"
schema_policy = "stop"
epoch_seconds = 1

[table."public.orders"]
special_values = { price = "text" }

[table.customers]
special_values = "null"

[[sink]]
kind = "delta"
path = "lake"

[[sink]]
name = "history"
kind = "parquet"
path = "/srv/changes"
tables = ["sales.*"]

[backfill]
mode = "single"
split_rows = 5000
split_kind = "key"
rows_per_second = 1000

[spark]
master = "local[2]"
conf = { "spark.driver.memory" = "2g" }

[limits]
max_rows = 10
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "pipeline.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text))
    return caught.value


def test_the_smallest_file_has_defaults_for_all_else(tmp_path: Path) -> None:
    config = load(written(tmp_path, SMALLEST))
    assert (config.name, config.store) == ("pipeline", str(tmp_path / "headwater/pipeline"))
    assert config.work == tmp_path / "headwater/pipeline"
    assert config.capture_options == CaptureOptions()
    (sink,) = config.sink
    assert (sink.label, sink.delivery, sink.place) == ("delta", Mode.MIRROR, str(tmp_path / "lake"))
    options = config.query_options(sink, ["public.orders"])
    assert (options.query, options.tables, options.keyed) == ("pipeline-delta", ("public.orders",), True)
    assert options.history
    assert options.backfill == "parallel"


def test_every_setting_reaches_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_TEST_WORD", "hidden")
    config = load(written(tmp_path, WHOLE))
    assert config.dsn == "postgresql://app:hidden@db/shop"
    assert config.capture_options.schema_policy is SchemaPolicy.STOP
    assert config.capture_options.epoch_seconds == 1.0
    assert config.special_values == {
        "public.orders.price": SpecialValues.TEXT,
        "public.customers": SpecialValues.NULL,
    }
    _, changes = config.sink
    assert (changes.label, changes.delivery, changes.place) == ("history", Mode.CHANGES, "/srv/changes")
    options = config.query_options(changes, ["public.orders", "sales.lines"])
    assert options.tables == ("sales.lines",)
    assert (options.split_rows, options.split_kind, options.rows_per_second) == (5000, SplitKind.KEY, 1000)
    assert (options.backfill, options.max_rows, options.keyed) == ("single", 10, False)


def test_the_connection_string_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SMALLEST.replace('dsn = "postgresql://app@db/shop"', 'dsn_env = "HEADWATER_TEST_DSN"')
    monkeypatch.delenv("HEADWATER_TEST_DSN", raising=False)
    error = refused(tmp_path, text)
    assert "line 2" in error.message
    assert "HEADWATER_TEST_DSN" in error.message
    assert error.next_step == "Run: export HEADWATER_TEST_DSN=…"
    monkeypatch.setenv("HEADWATER_TEST_DSN", "postgresql://x")
    assert load(written(tmp_path, text)).dsn == "postgresql://x"


def test_the_connection_string_may_be_in_a_file_that_is_read_for_each_connection(tmp_path: Path) -> None:
    text = SMALLEST.replace('dsn = "postgresql://app@db/shop"', 'dsn_file = "shop.dsn"')
    error = refused(tmp_path, text)
    assert "line 2" in error.message
    assert f"{tmp_path}/shop.dsn: No such file" in error.message
    (tmp_path / "shop.dsn").write_text("postgresql://app:first@db/shop\n")
    config = load(written(tmp_path, text))
    assert config.dsn == f"file:{tmp_path}/shop.dsn"
    assert current_dsn(config.dsn) == "postgresql://app:first@db/shop"
    assert config.home == "public"
    assert "first" not in repr(config)
    address = Dsn(config.dsn)
    (tmp_path / "shop.dsn").write_text("postgresql://app:second@db/shop")
    assert "password=second" in reread(address).conninfo()
    (tmp_path / "shop.dsn").write_text("")
    with pytest.raises(DsnUnreadable, match="it is empty"):
        reread(address)


def test_a_sink_in_a_database_may_have_its_connection_string_in_a_file(tmp_path: Path) -> None:
    text = SMALLEST.replace('kind = "delta"\npath = "lake"', 'kind = "postgres"\ndsn_file = "out.dsn"')
    assert refused(tmp_path, text).key == "sink.0.dsn_file"
    (tmp_path / "out.dsn").write_text("postgresql://writer:hidden@db/warehouse")
    config = load(written(tmp_path, text))
    assert config.sink[0].options["dsn"] == f"file:{tmp_path}/out.dsn"
    assert config.sink[0].place == "postgresql://writer@db:5432/warehouse"
    both = refused(tmp_path, text.replace("dsn_file", 'dsn = "postgresql://x"\ndsn_file'))
    assert "both dsn and dsn_file" in both.message


def test_a_secret_of_a_sink_may_be_in_a_file(tmp_path: Path) -> None:
    options = 'storage_options = { AWS_SECRET_ACCESS_KEY = "file:keys/secret", x = "file:///not/one" }'
    text = SMALLEST.replace('path = "lake"', f'path = "lake"\n{options}')
    error = refused(tmp_path, text)
    assert error.key == "sink.0.storage_options.AWS_SECRET_ACCESS_KEY"
    assert "line 8" in error.message
    assert f"{tmp_path}/keys/secret: No such file" in error.message
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "secret").write_text("hidden\n")
    config = load(written(tmp_path, text))
    assert config.sink[0].options["storage_options"] == {
        "AWS_SECRET_ACCESS_KEY": f"file:{tmp_path}/keys/secret",
        "x": "file:///not/one",
    }
    assert "hidden" not in repr(config.sink[0].open())
    sink = config.sink[0].open()
    assert isinstance(sink, DeltaSink)
    assert sink._root.options == {"AWS_SECRET_ACCESS_KEY": "hidden", "x": "file:///not/one"}


def test_an_unset_variable_is_named_and_a_doubled_dollar_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWATER_TEST_WORD", raising=False)
    error = refused(tmp_path, WHOLE)
    assert error.key == "source.dsn"
    assert "line 6" in error.message
    assert "HEADWATER_TEST_WORD" in error.message
    config = load(written(tmp_path, SMALLEST.replace("app@", "a$${b}@")))
    assert config.dsn == "postgresql://a${b}@db/shop"


@pytest.mark.parametrize(
    ("before", "after", "line", "key", "says"),
    [
        ('dsn = "', 'slto = "x"\ndsn = "', 2, "source.slto", "Did you mean slot?"),
        ("[[sink]]", "[sinks]\n[[sink]]", 5, "sinks", "Did you mean sink?"),
        ('path = "lake"', 'pth = "lake"', 7, "sink.0.pth", "Did you mean path?"),
        ('kind = "delta"', 'kind = "detla"', 6, "sink.0.kind", "Did you mean 'delta'?"),
        ("[[sink]]", '[backfill]\nmode = "fast"\n[[sink]]', 6, "backfill.mode", "'parallel', 'single'"),
        (
            "[[sink]]",
            '[table."a.b"]\nspecial_values = { c = "nul" }\n[[sink]]',
            6,
            "table.a.b.special_values.c",
            "null",
        ),
        ("[[sink]]", '[table."a.b"]\nspecial_values = "error"\n[[sink]]', 6, "table.a.b.special_values.*", "'stop'"),
    ],
)
def test_what_nobody_knows_is_refused_with_the_nearest_that_is_known(
    tmp_path: Path, before: str, after: str, line: int, key: str, says: str
) -> None:
    error = refused(tmp_path, SMALLEST.replace(before, after, 1))
    assert error.key == key
    assert f"pipeline.toml, line {line}:" in error.message
    assert says in str(error.next_step)


@pytest.mark.parametrize(
    ("before", "after", "key", "says"),
    [
        ('tables = ["public.orders"]\n', "", "source.tables", "missing"),
        ('["public.orders"]', "[]", "source.tables", "at least 1 item"),
        ('["public.orders"]', '"public.orders"', "source.tables", "received a text"),
        ("[[sink]]", '[backfill]\nsplit_rows = "5"\n[[sink]]', "backfill.split_rows", "received a text"),
        ("[[sink]]", "[backfill]\nsplit_rows = 0\n[[sink]]", "backfill.split_rows", "received 0"),
        ("[[sink]]", '[pipeline]\nname = "a b"\n[[sink]]', "pipeline.name", "is no name"),
        ("[[sink]]", "[sink]", "sink", "several sinks"),
        ('path = "lake"', "path = 3", "sink.0.path", "valid string"),
        ('dsn = "postgresql://app@db/shop"\n', "", "source", "needs one of dsn, dsn_env and dsn_file"),
        ("[source]", "[src]", "src", "no key that is known"),
    ],
)
def test_a_wrong_value_is_told_with_its_key(tmp_path: Path, before: str, after: str, key: str, says: str) -> None:
    error = refused(tmp_path, SMALLEST.replace(before, after, 1))
    assert error.key == key
    assert says in error.message
    assert error.next_step


def test_two_sinks_of_one_name_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, SMALLEST + SMALLEST[SMALLEST.index("[[sink]]") :])
    assert error.key == "sink.1.name"
    assert "line 8" in error.message


def test_no_message_shows_the_connection_string(tmp_path: Path) -> None:
    error = refused(tmp_path, SMALLEST.replace('dsn = "postgresql://app@db/shop"', 'dsn = ["hidden word"]'))
    assert "hidden" not in str(error)


def test_a_file_that_is_not_there_or_no_toml_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigNotFound, match=r"docs/pipeline\.md"):
        load(tmp_path / "pipeline.toml")
    assert "line 2" in refused(tmp_path, "[source]\ndsn = \n").message


def test_settings_from_python_need_no_file() -> None:
    config = configure({"source": {"dsn": "postgresql://x", "tables": ["a"]}, "pipeline": {"name": "n"}})
    assert isinstance(config, PipelineConfig)
    assert config.store == str(Path.cwd() / "headwater/n")
    with pytest.raises(ConfigError) as caught:
        configure({"source": {"dsn": "postgresql://x", "tables": ["a"], "epoch": 1}})
    assert caught.value.message == "[source] epoch is no key that is known."


def test_a_store_on_an_object_store_keeps_the_rest_in_a_local_directory(tmp_path: Path) -> None:
    config = load(written(tmp_path, '[pipeline]\nstore = "slatedb+s3://bucket/shop"\n' + SMALLEST))
    assert config.store == "slatedb+s3://bucket/shop"
    assert config.work == tmp_path / "headwater/pipeline"


def test_patterns_choose_tables() -> None:
    tables = ["public.orders", "public.lines", "sales.lines"]
    assert matching(["public.*"], tables, "public") == tables[:2]
    assert matching(["lines", "sales.*"], tables, "public") == tables[1:]
    assert matching(["*"], tables, "public") == tables
    assert is_pattern("public.*")
    assert not is_pattern('"odd*name"')


def test_a_name_alone_stands_for_a_table_in_the_database_of_the_address(tmp_path: Path) -> None:
    text = SMALLEST.replace("postgresql://app@db/shop", "mysql://app@db/My%20shop")
    config = load(written(tmp_path, text))
    tables = ['"My shop".orders', "public.orders", "other.orders"]
    assert matching(["orders"], tables, config.home) == tables[:1]
    assert config.query_options(SinkSection(kind="delta", tables=["orders"]), tables).tables == tuple(tables[:1])
    nowhere = load(written(tmp_path, text.replace("My%20shop", "")))
    assert matching(["orders"], tables, nowhere.home) == []
    assert matching(["*.orders"], tables, nowhere.home) == tables


def test_the_line_of_a_key_is_found_in_headers_dotted_keys_and_arrays() -> None:
    text = 'a.b = 1\n[c]\nd = 2 # x\n[[e]]\nf = 1\n[[e]]\nf = 2\n[g."h.i"]\nj = 3\n'
    assert line_of(text, ("a", "b")) == 1
    assert line_of(text, ("c", "d")) == 3
    assert line_of(text, ("e", 1, "f")) == 7
    assert line_of(text, ("e", 0, "missing")) == 4
    assert line_of(text, ("g", "h.i", "j")) == 9
    assert line_of(text, ("nothing",)) is None


def test_a_sink_is_added_at_the_end_and_the_rest_stays_as_it_was() -> None:
    text = '# mine\n[source]\ndsn = "x" # secret\n\n[[sink]]\nkind = "delta"\n[[derive]]\nname = "sums"'
    options = {
        "kind": "kafka",
        "tables": ["a", 'b"c'],
        "settings": {"acks": "all", "a.b": "1"},
        "rows": 3,
        "adopt": True,
    }
    added = with_table(text, "sink", options)
    assert added.startswith(text + "\n\n[[sink]]\n")
    assert tomllib.loads(added)["sink"] == [{"kind": "delta"}, options]
    with pytest.raises(ValueError, match="Unable to convert"):
        with_table(text, "sink", {"nothing": object()})


def _with(*sinks: Mapping[str, object], **settings: object) -> PipelineConfig:
    source = {"dsn": "postgresql://app@db/shop", "tables": ["public.orders"]}
    return configure({"source": source, "sink": list(sinks), **settings}, folder=Path("/srv"))


def test_a_sink_has_its_history_from_the_tables_that_another_one_keeps() -> None:
    lake = {"kind": "delta", "path": "lake"}
    config = _with({"kind": "table"}, lake, {**lake, "name": "direct", "from": "source"}, backfill={"from": "tables"})
    tables, delta, direct = (config.query_options(sink, ["public.orders"]) for sink in config.sink)
    assert (tables.kept, tables.origin) == (None, "source")
    assert (delta.kept, delta.origin) == (str(config.work / "tables"), "tables")
    assert direct.origin == "source"
    alone = _with(lake)
    assert alone.query_options(alone.sink[0], ["public.orders"]).kept is None


def test_a_sink_that_begins_at_an_epoch_or_a_time_has_no_history() -> None:
    lake = {"kind": "parquet", "path": "lake"}
    for since, text in ((65536, "65536"), ("2026-05-31T12:00:00Z", "2026-05-31T12:00:00Z")):
        config = _with({**lake, "since": since})
        options = config.query_options(config.sink[0], ["public.orders"])
        assert (options.history, options.since) == (False, text)


@pytest.mark.parametrize(
    ("sink", "problem"),
    [
        ({"kind": "delta", "path": "lake", "from": "tables"}, "none are kept"),
        ({"kind": "delta", "path": "lake", "from": "moon"}, "Valid are 'auto', 'source', 'tables'"),
        ({"kind": "delta", "path": "lake", "since": "yesterday"}, "neither an epoch nor a time"),
        ({"kind": "table", "since": 65536}, "no meaning for tables that we keep"),
        ({"kind": "delta", "path": "lake", "form": "tables"}, "Did you mean from"),
    ],
)
def test_a_beginning_that_cannot_be_is_refused(sink: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _with(sink)


@pytest.mark.parametrize("source", ['dsn_env = "SHOP_DSN"', 'dsn_file = "dsn"', 'dsn = "${SHOP_DSN}"'])
def test_a_sink_is_added_in_python_to_a_pipeline_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    address = "postgresql://u:a${b}$${c}@db/shop"  # what a variable holds is no variable itself
    monkeypatch.setenv("SHOP_DSN", address)
    (tmp_path / "dsn").write_text(f"{address}\n")
    path = tmp_path / "pipeline.toml"
    path.write_text(f'[source]\n{source}\ntables = ["t"]\n[[sink]]\nkind = "console"\nsince = 2026-01-01T00:00:00Z\n')
    pipeline = Pipeline.from_toml(path)
    before = pipeline.config
    pipeline.sink("delta", path=tmp_path / "lake")
    assert current_dsn(pipeline.config.dsn) == address
    assert pipeline.config.sink[0] == before.sink[0]
    assert (pipeline.config.work, [sink.label for sink in pipeline.config.sink]) == (before.work, ["console", "delta"])


def test_settings_do_not_show_what_is_secret() -> None:
    sink = {"kind": "postgres", "dsn": "postgres://u:hidden@host/db"}
    config = configure({"source": {"dsn": "postgres://u:hidden@host/db", "tables": ["a"]}, "sink": [sink]})
    assert "hidden" not in repr(config)
    assert "hidden" not in str(config.sink[0])
