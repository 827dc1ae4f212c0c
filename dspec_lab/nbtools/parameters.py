"""The parameters of a notebook: what its `parameters` cell declares, and what a params file sets."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = "parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One line of the parameters cell: `name: annotation = default  # note`."""

    name: str
    default: Any
    line: int  # in the cell, from 1


def tagged_cells(notebook: Mapping[str, Any]) -> list[int]:
    """Positions of the cells tagged `parameters`."""
    return [i for i, cell in enumerate(notebook["cells"]) if TAG in cell["metadata"].get("tags", [])]


def read_parameters(source: str) -> tuple[list[Parameter], list[str]]:
    """(parameters, faults) of the text of a parameters cell.

    papermill sets only plain lines with one `=`: it skips a type with a bar and a line with a second `=`, and what
    is computed from another parameter stays stale. Each such line is a fault here.
    """
    parameters: list[Parameter] = []
    faults: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parsed = _assignment(line)
        if isinstance(parsed, str):
            faults.append(f"line {number}: {parsed}: {line.strip()!r}")
        elif parsed[0] in {parameter.name for parameter in parameters}:
            faults.append(f"line {number}: {parsed[0]} is set twice")
        else:
            parameters.append(Parameter(name=parsed[0], default=parsed[1], line=number))
    return parameters, faults


def _assignment(line: str) -> tuple[str, Any] | str:
    try:
        statements = ast.parse(line).body
    except SyntaxError:
        return "not one whole assignment"
    if len(statements) != 1:
        return "not one assignment"
    statement = statements[0]
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
        if "|" in ast.unparse(statement.annotation):
            return "its type has a |, which papermill skips"
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    else:
        return "not a plain assignment"
    if not isinstance(target, ast.Name):
        return "not an assignment to one name"
    if line.count("=") != 1:
        return "more than one =, which papermill skips"
    try:
        return target.id, ast.literal_eval(value)
    except ValueError:
        return "its value is not a literal"


def declared(notebook: Mapping[str, Any], name: str) -> list[Parameter]:
    """Parameters of the notebook called `name`; ValueError unless one well-formed cell declares them."""
    cells = tagged_cells(notebook)
    if len(cells) != 1:
        raise ValueError(f"{name} has {len(cells)} cells tagged {TAG!r}, it needs one")
    parameters, faults = read_parameters(notebook["cells"][cells[0]]["source"])
    if faults:
        raise ValueError(f"{name}, parameters cell, {faults[0]}")
    return parameters


def check_values(parameters: list[Parameter], values: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a value whose name the notebook does not declare or whose type is not its default's."""
    by_name = {parameter.name: parameter for parameter in parameters}
    for key, value in values.items():
        if key not in by_name:
            raise ValueError(f"{name} has no parameter {key!r}; it has {', '.join(by_name) or 'none'}")
        default = by_name[key].default
        same = type(value) is type(default) or (type(value) is int and type(default) is float)
        if default is not None and not same:
            raise ValueError(f"{name}: {key} must be {type(default).__name__} like {default!r}, got {value!r}")


def read_params_file(path: Path) -> dict[str, dict[str, Any]]:
    """{notebook name without ending: {parameter: value}} from a YAML file; other shapes raise ValueError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{path} must map notebook names to parameters, it holds {type(content).__name__}")
    for name, values in content.items():
        if not isinstance(name, str) or not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"{path}: {name!r} must map parameter names to values, got {values!r}")
    return content
