"""Notebooks as committed: the same as their text twins, fit by the lint, on the map, and set by the parameter files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspec_lab.nbtools.contents import contents, load_notebook
from dspec_lab.nbtools.lint import lint_notebook
from dspec_lab.nbtools.parameters import check_values, declared, read_params_file
from dspec_lab.nbtools.sync import differences, orphan_twins

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks_and_no_twin_without_one():
    assert [path.stem for path in NOTEBOOKS][:2] == ["00_first_run", "01_why_lossless"]
    assert orphan_twins(FOLDER) == []


@BY_NAME
def test_notebook_and_twin_are_the_same(path):
    assert differences(path) == []


@BY_NAME
def test_notebook_is_fit_to_commit(path):
    assert lint_notebook(path) == []
    assert load_notebook(path)["metadata"]["kernelspec"]["name"] == "python3"


def test_the_map_of_notebook_00_links_all_others_and_nothing_else():
    cells = load_notebook(NOTEBOOKS[0])["cells"]
    (text,) = [cell["source"] for cell in cells if cell["source"].startswith("## Map")]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| question |" not in line]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links == [path.name for path in NOTEBOOKS[1:]]
    # the questions are those that the notebooks themselves ask
    asked = [entry.question.removeprefix("Question.** ") for entry in contents(FOLDER)]
    assert [row.split("|")[2].strip() for row in rows] == asked


@pytest.mark.parametrize("name", ["fast", "full"])
def test_parameter_files_set_what_the_notebooks_declare(name):
    values = read_params_file(FOLDER / "params" / f"{name}.yaml")
    assert set(values) == {path.stem for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        check_values(declared(load_notebook(path), path.name), values[path.stem], path.name)
