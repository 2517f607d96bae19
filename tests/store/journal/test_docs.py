"""The snippets of the guide run, in order, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "journal.md"


def test_the_snippets_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {})
    assert "somebody was faster" in capsys.readouterr().out
