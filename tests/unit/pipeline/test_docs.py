"""The page about pipelines names every key that there is, and its example is valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headwater.pipeline.config import PipelineConfig, configure
from headwater.sinks.open import KINDS, option_names

PAGE = (Path(__file__).parents[3] / "docs/pipeline.md").read_text()


def test_every_key_is_in_the_table_and_every_one_in_the_table_is_a_key() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    told = {name.replace('."s.t"', "") for row in rows for name in re.findall(r"`([a-z]+(?:\.[^`]+)+)`", row)}
    keys = set()
    for section, field in PipelineConfig.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        known = [found for kind in kinds for found in getattr(kind, "model_fields", {}).items()]
        keys |= {f"{section}.{one.alias or key}" for key, one in known}
    assert told == keys


def test_every_option_of_a_sink_is_in_the_table_of_sinks() -> None:
    page = (Path(__file__).parents[3] / "docs/sinks.md").read_text()
    told = set(re.findall(r"^\| `([a-z]+)` \| `([a-z_]+)` \|", page, re.MULTILINE))
    known = {(kind, option) for kind in KINDS for option in option_names(kind) if option not in ("mode", "staging")}
    assert {pair for pair in told if pair[0] in KINDS and pair[1] not in ("mirror", "changes", "history")} == known


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "x")
    found = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    assert configure(tomllib.loads(found[1])).name == "shop"
