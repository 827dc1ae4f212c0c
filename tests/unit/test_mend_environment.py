"""What an interrupted install leaves half done is found, and only that is made to be installed again."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "mend_environment.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mend_environment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(folder: Path, name: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (folder / f"{name}.py").write_text("x = 1\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    listed = (f"{name}.py", f"__pycache__/{name}.pyc", f"{info.name}/METADATA", f"{info.name}/RECORD")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in listed))


def test_only_half_done_packages_are_mended(tmp_path, script, capsys):
    for name in ("whole", "killed_while_copied", "killed_while_replaced"):
        install(tmp_path, name)
    (tmp_path / "killed_while_copied-1.0.dist-info" / "RECORD").unlink()
    (tmp_path / "killed_while_replaced.py").unlink()
    (tmp_path / "~illed_while_replaced").mkdir()
    assert script.mend(tmp_path) == ["killed_while_copied-1.0", "killed_while_replaced-1.0"]
    left = sorted(name for name in os.listdir(tmp_path) if "dist-info" in name or name.startswith("~"))
    assert left == ["whole-1.0.dist-info"]
    assert script.mend(tmp_path) == []
