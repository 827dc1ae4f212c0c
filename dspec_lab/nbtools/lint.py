"""What a notebook must be like before it is committed (style guide, section 6)."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from dspec_lab.nbtools.contents import NAME, first_heading, first_question, load_notebook
from dspec_lab.nbtools.parameters import TAG, read_parameters, tagged_cells

MAX_LINES = 15
RULE = re.compile(r"\|[-:| ]+\|")  # under a table's head, drawn as a rule and not read as a line
# these run a callback where its exception is lost, so that a broken notebook passes
SWALLOWERS = ("interact", "interactive", "interact_manual", "interactive_output", "Output")


def lint_notebook(path: Path) -> list[str]:
    """Every fault of the notebook in `path`, in words; none when it is fit to commit."""
    notebook = load_notebook(path)
    cells = notebook["cells"]
    faults = []
    if not NAME.fullmatch(path.name):
        faults.append("its name is not NN_slug.ipynb in lower case")
    if not cells:
        return [f"{path.name}: {fault}" for fault in [*faults, "it has no cells"]]
    faults += _format_faults(notebook) + _order_faults(cells)
    trees: list[ast.Module] = []
    for number, cell in enumerate(cells, 1):
        faults += [f"cell {number}: {fault}" for fault in _cell_faults(cell)]
        if cell["cell_type"] == "code":
            try:
                trees.append(ast.parse(cell["source"]))
            except SyntaxError as error:
                faults.append(f"cell {number}: not plain Python ({error.msg}, line {error.lineno})")
                continue
            faults += [f"cell {number}: {fault}" for fault in _code_faults(trees[-1])]
    faults += _panel_faults(trees)
    return [f"{path.name}: {fault}" for fault in faults]


def _format_faults(notebook: Any) -> list[str]:
    faults = []
    if (notebook["nbformat"], notebook["nbformat_minor"]) < (4, 5):
        faults.append(f"notebook format {notebook['nbformat']}.{notebook['nbformat_minor']}; 4.5 has cell ids")
    ids = [cell.get("id") for cell in notebook["cells"]]
    if not all(ids):
        faults.append(f"cell {ids.index(next(i for i in ids if not i)) + 1} has no id")
    elif len(set(ids)) != len(ids):
        faults.append("two cells have the same id")
    if "widgets" in notebook["metadata"]:
        faults.append("stored widget state in its metadata")
    return faults


def _order_faults(cells: list[Any]) -> list[str]:
    faults = []
    first = cells[0]["source"] if cells[0]["cell_type"] == "markdown" else ""
    if not first_heading(first):
        faults.append("the first cell is not a title")
    if not first_question(first):
        faults.append("the first cell asks no question")
    tagged = tagged_cells({"cells": cells})
    code = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    if len(tagged) != 1:
        faults.append(f"{len(tagged)} cells tagged {TAG!r}, it needs one")
    elif cells[tagged[0]]["cell_type"] != "code" or tagged[0] != code[0]:
        faults.append(f"the cell tagged {TAG!r} is not the first code cell")
    else:
        _, found = read_parameters(cells[tagged[0]]["source"])
        faults += [f"cell {tagged[0] + 1}, {fault}" for fault in found]
    if not _asserts(cells[-1]):
        faults.append("the last cell has no assertion")
    return faults


def _asserts(cell: Any) -> bool:
    if cell["cell_type"] != "code":
        return False
    try:
        tree = ast.parse(cell["source"])
    except SyntaxError:
        return False
    # `assert True` and the like claim nothing
    return any(isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in ast.walk(tree))


def _cell_faults(cell: Any) -> list[str]:
    faults = []
    text = cell["source"].split("\n")
    lines = sum(cell["cell_type"] != "markdown" or RULE.fullmatch(line) is None for line in text)
    if lines > MAX_LINES:
        faults.append(f"{lines} lines, {MAX_LINES} are allowed")
    if cell["cell_type"] == "code":
        if not cell["source"].strip():
            faults.append("empty")
        if cell["outputs"] or cell["execution_count"] is not None:
            faults.append("committed with outputs")
    return faults


def _code_faults(tree: ast.Module) -> list[str]:
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            faults.append(f"defines {node.name}; logic belongs in the package")
        elif isinstance(node, ast.Call) and _called_name(node) in SWALLOWERS:
            faults.append(f"uses {_called_name(node)}, which hides exceptions")
    return faults


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _panel_faults(trees: list[ast.Module]) -> list[str]:
    """A fault for each panel class imported from the widgets and used, of which no `.static()` is shown."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    panels = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dspec_lab.widgets")
        for alias in node.names
        if alias.name[:1].isupper()
    }
    # name of a variable -> the panel class it was made from
    made = {
        node.targets[0].id: _called_name(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and _called_name(node.value) in panels
    }
    shown = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "static":
            owner = node.func.value
            if isinstance(owner, ast.Call):
                shown.add(_called_name(owner))
            elif isinstance(owner, ast.Name):
                shown.add(made.get(owner.id, owner.id))
    used = {_called_name(node) for node in nodes if isinstance(node, ast.Call)} & panels
    return [f"the panel {name} has no static() twin in the notebook" for name in sorted(used - shown)]
