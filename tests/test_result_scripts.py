"""Every script under results/ can be imported: a page can be made anew whatever moved in the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results"
SCRIPTS = sorted(RESULTS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_pages_script_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.__doc__
