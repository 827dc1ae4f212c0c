"""The notebook tools on tiny notebooks: a strict runner, a lint that sees each fault, twins, and the list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dspec_lab.cli import main as shell
from dspec_lab.nbtools import contents, lint, parameters, run, sync

TITLE = "# Tiny\n\nDoes it run? It claims that two and two are four."
PARAMETERS = "gamma: int = 7  # drafted tokens per round\ntemperature: float = 1.0\nname = 'x'"


def code(source: str, *tags: str) -> Any:
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def text(source: str) -> Any:
    return nbformat.v4.new_markdown_cell(source)


def cells(*middle: Any) -> list[Any]:
    return [text(TITLE), code(PARAMETERS, "parameters"), *middle, code("assert gamma >= 1")]


def save(folder: Path, content: list[Any], name: str = "00_tiny.ipynb") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=content, metadata={"kernelspec": sync.KERNEL})
    path = folder / name
    path.write_text(nbformat.writes(notebook))
    return path


# parameters


def test_parameters_are_read_with_their_defaults():
    found, faults = parameters.read_parameters("# note\n" + PARAMETERS + "\n\nprompts: list = ['a', 'b']")
    assert faults == []
    assert {p.name: p.default for p in found} == {
        "gamma": 7,
        "temperature": 1.0,
        "name": "x",
        "prompts": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("seed: int | None = None", "its type has a |"),
        ("a = b = 1", "not a plain assignment"),
        ("a = 1  # a=1", "more than one ="),
        ("a = 'x=y'", "more than one ="),
        ("b = 2 * gamma", "not a literal"),
        ("a, b = 1, 2", "not an assignment to one name"),
        ("a = 1; b = 2", "not one assignment"),
        ("a = [", "not one whole assignment"),
        ("a += 1", "not a plain assignment"),
        ("import os", "not a plain assignment"),
        ("gamma: int", "not a plain assignment"),
        ("gamma = 3", "set twice"),
    ],
)
def test_each_line_papermill_would_get_wrong_is_a_fault(line, reason):
    _, faults = parameters.read_parameters("gamma: int = 7\n" + line)
    assert len(faults) == 1 and faults[0].startswith("line 2: ") and reason in faults[0]


def test_values_are_checked_by_name_and_type():
    found, _ = parameters.read_parameters(PARAMETERS)
    parameters.check_values(found, {"gamma": 3, "temperature": 0, "name": "y"}, "00_tiny.ipynb")
    with pytest.raises(ValueError, match="00_tiny.ipynb has no parameter 'gama'; it has gamma, temperature, name"):
        parameters.check_values(found, {"gama": 3}, "00_tiny.ipynb")
    for wrong in ({"gamma": "3"}, {"gamma": True}, {"gamma": 2.5}, {"name": 1}):
        with pytest.raises(ValueError, match="must be"):
            parameters.check_values(found, wrong, "00_tiny.ipynb")


def test_params_file_must_map_notebooks_to_values(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("00_tiny:\n  gamma: 3\n")
    assert parameters.read_params_file(path) == {"00_tiny": {"gamma": 3}}
    path.write_text("")
    assert parameters.read_params_file(path) == {}
    for bad in ("[1, 2]", "00_tiny: 3", "a: [", "00_tiny: {1: 2}"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"p\.yaml"):
            parameters.read_params_file(path)


# the runner


def test_a_notebook_runs_with_its_values_in_its_own_folder_and_stays_as_it_was(tmp_path):
    (tmp_path / "nb").mkdir()
    (tmp_path / "nb" / "beside.txt").write_text("seen")
    pixel = (
        "import base64\n"
        "from IPython.display import Image, display\n"
        "display(Image(data=base64.b64decode("
        "'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='), "
        "format='png'))"
    )
    checks = "from pathlib import Path\nassert Path('beside.txt').read_text() == 'seen'\nassert gamma == 3\nprint(name)"
    path = save(tmp_path / "nb", cells(code(checks), code(pixel)))
    before = path.read_bytes()
    result = run.run_notebook(path, tmp_path / "out", {"gamma": 3})
    assert result.error == "" and result.ok
    assert result.num_code_cells == 5  # four of ours and the injected values
    assert path.read_bytes() == before
    executed = json.loads(result.output.read_text())
    assert any(out.get("text") == ["x\n"] for cell in executed["cells"] for out in cell.get("outputs", []))
    (figure,) = run.extract_figures(result.output, tmp_path / "figures")
    assert figure.name == "00_tiny_1.png" and figure.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    path = save(tmp_path, cells())
    with pytest.raises(ValueError, match="no parameter 'gama'"):
        run.run_notebook(path, tmp_path / "out", {"gama": 3})
    assert not (tmp_path / "out").exists()


def test_the_folder_of_the_notebook_is_refused_as_output(tmp_path):
    path = save(tmp_path, cells())
    with pytest.raises(ValueError, match="another folder"):
        run.run_notebook(path, tmp_path)
    assert path.is_file()


@pytest.mark.parametrize(
    ("source", "limit_s", "told"),
    [
        ("raise KeyError('lost')", 60, "KeyError"),
        ("assert gamma == 8, 'claim broken'", 60, "claim broken"),
        ("import time\ntime.sleep(15)", 1, "longer than 1 s"),
        ("import os\nos._exit(3)", 60, "kernel died"),
    ],
)
def test_a_cell_that_fails_hangs_or_kills_its_kernel_is_a_failure(tmp_path, source, limit_s, told):
    path = save(tmp_path, cells(code(source)))
    result = run.run_notebook(path, tmp_path / "out", cell_timeout_s=limit_s)
    assert not result.ok and told in result.error
    assert result.wall_s < 45


def test_a_notebook_that_ends_itself_early_is_a_failure(tmp_path):
    path = save(tmp_path, cells(code("import sys\nsys.exit(0)")))
    result = run.run_notebook(path, tmp_path / "out")
    assert not result.ok and "SystemExit" in result.error


# the lint


def test_a_good_notebook_has_no_faults(tmp_path):
    panel = "from dspec_lab.widgets.demo import DemoPanel\npanel = DemoPanel(gamma)\npanel.static()\npanel"
    assert lint.lint_notebook(save(tmp_path, cells(text("Text."), code(panel)))) == []


def with_outputs() -> Any:
    cell = code("1")
    cell.outputs = [nbformat.v4.new_output("stream", text="1")]
    return cell


def counted() -> Any:
    cell = code("1")
    cell.execution_count = 1
    return cell


def test_the_rule_under_a_tables_head_is_no_line(tmp_path):
    table = text("\n".join(["| a |", "|---|"] + ["| b |"] * 14))
    assert lint.lint_notebook(save(tmp_path, cells(table))) == []


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (cells(code("def f():\n    return 1")), "cell 3: defines f"),
        (cells(code("class A:\n    pass")), "cell 3: defines A"),
        (cells(code("\n".join(f"x{i} = {i}" for i in range(16)))), "cell 3: 16 lines"),
        (cells(text("\n".join(["| a |", "|---|"] + ["| b |"] * 15))), "cell 3: 16 lines"),
        (cells(with_outputs()), "cell 3: committed with outputs"),
        (cells(counted()), "cell 3: committed with outputs"),
        (cells(code("%matplotlib inline")), "cell 3: not plain Python"),
        (cells(code("")), "cell 3: empty"),
        (cells(code("from ipywidgets import interact\ninteract(print, x=1)")), "cell 3: uses interact"),
        (cells(code("import ipywidgets as w\nout = w.Output()")), "cell 3: uses Output"),
        (cells()[:-1], "the last cell has no assertion"),
        ([*cells(), text("The end.")], "the last cell has no assertion"),
        ([*cells(), code("assert True")], "the last cell has no assertion"),
        ([text("# Tiny"), *cells()[1:]], "the first cell asks no question"),
        ([text("Does it run?"), *cells()[1:]], "the first cell is not a title"),
        ([text(TITLE), code("assert 1 == 1.0")], "0 cells tagged 'parameters'"),
        (cells(code("a = 1", "parameters")), "2 cells tagged 'parameters'"),
        ([text(TITLE), code("import os"), *cells()[1:]], "is not the first code cell"),
        ([text(TITLE), code("b = 2 * 3 + x", "parameters"), cells()[-1]], "cell 2, line 1: its value is not a literal"),
        (
            cells(code("from dspec_lab.widgets.demo import DemoPanel\nDemoPanel(gamma)")),
            "the panel DemoPanel has no static() twin",
        ),
        (
            cells(
                code("from dspec_lab.widgets.demo import APanel, BPanel"),
                code("a = APanel()\nb = BPanel()\nb.static()"),
            ),
            "the panel APanel has no static() twin",
        ),
    ],
)
def test_the_lint_sees_each_fault(tmp_path, content, fault):
    found = lint.lint_notebook(save(tmp_path, content))
    assert len(found) == 1 and fault in found[0], found


def test_the_lint_sees_old_formats_ids_names_and_stored_state(tmp_path):
    path = save(tmp_path, cells())
    content = json.loads(path.read_text())
    content["cells"][1]["id"] = content["cells"][0]["id"]
    path.write_text(json.dumps(content))
    assert lint.lint_notebook(path) == ["00_tiny.ipynb: two cells have the same id"]
    content["metadata"]["widgets"] = {}
    for cell in content["cells"]:
        del cell["id"]
    content["nbformat_minor"] = 4  # the last format without cell ids
    path.write_text(json.dumps(content))
    found = lint.lint_notebook(path)
    assert [word in " ".join(found) for word in ("format 4.4", "cell 1 has no id", "stored widget state")] == [True] * 3
    assert any("NN_slug" in fault for fault in lint.lint_notebook(save(tmp_path, cells(), "Tiny.ipynb")))
    assert lint.lint_notebook(save(tmp_path, [], "01_none.ipynb")) == ["01_none.ipynb: it has no cells"]


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    path = tmp_path / "00_bad.ipynb"
    for content in ("{", "[]", '{"cells": 3}', "", '{"nbformat": 4, "nbformat_minor": 5}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="00_bad.ipynb is not a notebook"):
            lint.lint_notebook(path)


# twins


def test_a_twin_made_from_a_notebook_agrees_and_each_change_is_seen(tmp_path):
    path = save(tmp_path, cells(text("Some *text*.\n\nMore."), code("x = 1\n\n\ny = 2")))
    assert sync.differences(path) == ["00_tiny.ipynb has no twin text/00_tiny.py"]
    twin = sync.twin_from_notebook(path)
    assert sync.differences(path) == []
    good = twin.read_text()
    twin.write_text(good.replace("y = 2", "y = 3"))
    assert sync.differences(path) == ["00_tiny.ipynb, cell 4: text differs from 00_tiny.py"]
    twin.write_text(good.replace(' tags=["parameters"]', ""))
    assert sync.differences(path) == ["00_tiny.ipynb, cell 2: tags differs from 00_tiny.py"]
    twin.write_text(good + "\n# %%\nz = 3\n")
    assert sync.differences(path) == ["00_tiny.ipynb has 5 cells, 00_tiny.py has 6"]


def test_a_notebook_made_from_its_twin_keeps_the_ids_of_its_cells(tmp_path):
    path = save(tmp_path, cells(code("x = 1"), counted()))
    twin = sync.twin_from_notebook(path)
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    twin.write_text(twin.read_text().replace("x = 1", "x = 1\n\n# %% [markdown]\n# New.\n\n# %%\nassert x"))
    assert sync.notebook_from_twin(twin) == path
    assert sync.differences(path) == []
    made = json.loads(path.read_text())["cells"]
    assert [cell["id"] for cell in made if cell["id"] in ids] == ids
    assert len(made) == len(ids) + 2 == len({cell["id"] for cell in made})
    assert all(
        cell["execution_count"] is None and cell["outputs"] == [] for cell in made if cell["cell_type"] == "code"
    )
    assert lint.lint_notebook(path) == []


def test_a_second_sync_changes_nothing(tmp_path):
    twin = sync.twin_from_notebook(save(tmp_path, cells()))
    first = sync.notebook_from_twin(twin).read_bytes()
    assert sync.notebook_from_twin(twin).read_bytes() == first
    assert sync.twin_from_notebook(sync.notebook_of(twin)).read_bytes() == twin.read_bytes()


# the list and the command


def test_notebooks_are_found_by_number_and_name(tmp_path):
    for name in ("01_b.ipynb", "00_a.ipynb"):
        save(tmp_path, cells(), name)
    stems = [path.stem for path in contents.find_notebooks(tmp_path)]
    assert stems == ["00_a", "01_b"]
    assert [path.stem for path in contents.find_notebooks(tmp_path, ["01", "01_b.ipynb"])] == ["01_b"]
    with pytest.raises(ValueError, match="no notebook '07'.*00_a, 01_b"):
        contents.find_notebooks(tmp_path, ["07"])
    with pytest.raises(ValueError, match="holds no notebook"):
        contents.find_notebooks(tmp_path / "text")


@pytest.mark.parametrize(
    ("source", "title", "question"),
    [
        (TITLE, "Tiny", "Does it run?"),
        ("# Why is it lossless?\nIt is.", "Why is it lossless?", "Why is it lossless?"),
        ("# A\nFirst. **How far\ndoes it go?** Far.", "A", "How far does it go?"),
        ("no heading", "", ""),
    ],
)
def test_title_and_question_are_read_from_the_first_cell(tmp_path, source, title, question):
    save(tmp_path, [text(source), code("assert 1 == 1.0")])
    (entry,) = contents.contents(tmp_path)
    assert (entry.title, entry.question) == (title, question)


def test_the_command_runs_checks_syncs_and_lists(tmp_path, capsys):
    folder = tmp_path / "notebooks"
    path = save(folder, cells(code("assert gamma == 3")))
    at = ["--folder", str(folder)]
    assert shell.main(["notebooks", "lint", *at]) == 1
    assert "has no twin" in capsys.readouterr().out
    assert shell.main(["notebooks", "sync", "--to-text", *at]) == 0
    assert shell.main(["notebooks", "lint", *at]) == 0
    twin = sync.twin_of(path)
    twin.write_text(twin.read_text().replace("Tiny", "Small"))
    assert shell.main(["notebooks", "sync", "--check", *at]) == 1
    assert shell.main(["notebooks", "sync", *at]) == 0
    assert shell.main(["notebooks", "sync", "--check", *at]) == 0
    new = twin.with_name("01_new.py")
    new.write_text(twin.read_text())
    assert shell.main(["notebooks", "sync", "--check", *at]) == 1
    assert shell.main(["notebooks", "sync", "01", *at]) == 0
    assert (folder / "01_new.ipynb").is_file()
    capsys.readouterr()
    assert shell.main(["notebooks", "contents", "00", "--json", "-", *at]) == 0
    assert json.loads(capsys.readouterr().out)["notebooks"] == [
        {"notebook": "00_tiny.ipynb", "title": "Small", "question": "Does it run?"}
    ]
    params = tmp_path / "p.yaml"
    params.write_text("00_tiny: {gamma: 3}\n")
    command = ["notebooks", "run", "00", "--params", str(params), "--output", str(tmp_path / "out"), "--json", "-", *at]
    assert shell.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["notebook"], row["ok"], row["parameters"]) for row in report["notebooks"]] == [
        ("00_tiny.ipynb", True, {"gamma": 3})
    ]
    params.write_text("00_tiny: {}\n")
    assert shell.main(command) == 1
    assert json.loads(capsys.readouterr().out)["notebooks"][0]["error"].startswith("cell 3: AssertionError")
    for bad, named in (("00_tiny: {gama: 3}", "gama"), ("07_none: {}", "07_none")):
        params.write_text(bad)
        assert shell.main(command) == 2
        assert named in capsys.readouterr().err
