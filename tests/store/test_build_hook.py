"""The build hook: a compiler makes the decoder, and without one the install goes on and says so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


class BuildHookInterface:
    """Stands for hatchling's, which is there only while a wheel is built."""

    def __init__(self, root: Path) -> None:
        self.root, self.said, self.app = str(root), list[str](), self

    def display_warning(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook over a copy of the source in an empty project."""
    interface = "hatchling.builders.hooks.plugin.interface"
    module = types.ModuleType(interface)
    module.BuildHookInterface = BuildHookInterface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface, module)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    headers = [str(header.relative_to(ROOT)) for header in ROOT.glob("src/**/*.h")]
    for source in [*loaded.SOURCES, *headers]:
        place = tmp_path / source
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / source).read_bytes())
    made = loaded.ExtensionBuildHook(tmp_path)
    made.sources = [Path(source) for source in loaded.SOURCES]
    return made


def libraries(hook: Any) -> list[Path]:
    return sorted(Path(hook.root).rglob("*.so"))


def test_a_compiler_makes_a_decoder_for_this_platform(hook: Any) -> None:
    try:
        subprocess.run([str(sysconfig.get_config_var("CC")).split()[0], "--version"], check=True, capture_output=True)
    except OSError:
        pytest.skip("there is no C compiler")
    build: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", build)
    wanted = sorted(Path(hook.root, source).with_name(source.stem + SUFFIX) for source in hook.sources)
    assert libraries(hook) == wanted
    assert build["infer_tag"] is True
    assert build["pure_python"] is False
    assert build["force_include"] == {str(made): str(made.relative_to(Path(hook.root, "src"))) for made in wanted}
    assert hook.said == []
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('headwater.sources.postgres._decoder', sys.argv[1])\n"
        "made = importlib.util.module_from_spec(spec)\n"
        "assert made.Decoder().held_rows == 0\n"
    )
    library = Path(hook.root, f"src/headwater/sources/postgres/_decoder{SUFFIX}")
    subprocess.run([sys.executable, "-c", program, str(library)], check=True, timeout=60)
    hook.clean([])
    assert libraries(hook) == []


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_the_build_goes_on_and_says_so_in_one_line(
    hook: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    old = Path(hook.root, "src/headwater/sources/postgres/_decoder" + SUFFIX)
    old.write_bytes(b"of an earlier build")
    build: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", build)
    assert build == {"force_include": {}}
    assert libraries(hook) == []
    assert len(hook.said) == len(hook.sources)
    for said in hook.said:
        assert "not compiled" in said
        assert "\n" not in said
