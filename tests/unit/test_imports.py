"""Imports point left only (style guide, section 1), and importing the package loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dspec_lab"
RANKS = [
    {"config"},
    {"core"},
    {"kernels"},
    {"models"},
    {"drafters"},
    {"verifier", "checkpoints"},
    {"training", "calibration", "scheduler", "serving"},
    {"evaluation", "bench"},
    {"plots", "widgets"},
    {"nbtools", "cli"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


def part_of(path: Path) -> str:
    """`models` for dspec_lab/models/fetch.py, `config` for dspec_lab/config.py, `` for dspec_lab/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imported_modules(tree: ast.AST, inside: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth; relative ones are resolved against package `inside`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*inside.split(".")[: len(inside.split(".")) - node.level + 1], *base.split(".")])
            found += [(node.lineno, f"{base}.{alias.name}".strip(".")) for alias in node.names]
    return found


def faults(path: Path, text: str) -> list[str]:
    part = part_of(path)
    inside = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    found = []
    for line, name in imported_modules(ast.parse(text), inside):
        where = f"{path.name}:{line} imports {name}"
        pieces = name.split(".")
        if pieces[0] == "dspec_kernels" and part != "kernels":
            found.append(f"{where}; only kernels may")
        if pieces[0] != "dspec_lab" or len(pieces) == 1 or pieces[1] not in RANK:
            continue
        if part == "" or RANK[pieces[1]] > RANK[part]:
            found.append(f"{where}, which lies right of {part or 'the package itself'}")
    return found


def test_every_part_of_the_package_has_a_rank():
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")} - {""}
    assert parts <= set(RANK), f"not in the order of imports: {sorted(parts - set(RANK))}"


@pytest.mark.parametrize("part", sorted(RANK))
def test_imports_point_left(part):
    paths = [path for path in PACKAGE.rglob("*.py") if part_of(path) == part]
    found = [fault for path in paths for fault in faults(path, path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_check_itself_sees_each_kind_of_import():
    core, cli = PACKAGE / "core" / "x.py", PACKAGE / "cli" / "x.py"
    for text in (
        "import dspec_lab.models.fetch",
        "from dspec_lab import models",
        "from dspec_lab.cli.main import main",
        "def f():\n    from ..models import fetch",
        "import dspec_kernels",
    ):
        assert len(faults(core, text)) == 1, text
    for text in ("import dspec_lab", "from dspec_lab.core.files import cache_dir", "from . import x", "import torch"):
        assert faults(core, text) == [], text
    assert faults(cli, "from dspec_lab.bench.record import run_record\nfrom dspec_lab.nbtools import lint") == []


def test_importing_the_package_loads_nothing_heavy():
    code = "import dspec_lab, sys; print(sorted({'torch', 'transformers', 'triton', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_core_and_models_modules_load_without_transformers_and_triton():
    code = (
        "import sys\n"
        "import dspec_lab.config, dspec_lab.core.files, dspec_lab.models.fetch, dspec_lab.bench.record\n"
        "print(sorted({'transformers', 'triton', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
