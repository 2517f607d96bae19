"""The documentation of the architecture names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headwater"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in SOURCE.rglob("*.py")
}
PACKAGES = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")


def is_known(name: str) -> bool:
    """Whether *name* is a module, or a name in one; ``*`` stands for any package."""
    pattern = re.escape(name).replace(r"\*", "[a-z]+")
    module = re.escape(name.rpartition(".")[0])
    return any(
        re.fullmatch(pattern, known)
        or (re.fullmatch(module, known) and not (SOURCE / known.replace(".", "/")).is_dir())
        for known in MODULES
    )


def test_modules_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(rf"`((?:{PACKAGES})\.[a-z_.*]+)`", text))
    names = {name for name in names if not name.endswith((".py", ".toml", ".*"))}
    assert len(names) > 40
    assert [name for name in sorted(names) if not is_known(name)] == []
    files = set(re.findall(rf"`((?:{PACKAGES}|consume_upstream)/[a-z_/]+\.py)`", text))
    assert len(files) > 10
    assert [
        name for name in sorted(files) if not any(str(path).endswith(f"/{name}") for path in SOURCE.rglob("*.py"))
    ] == []
