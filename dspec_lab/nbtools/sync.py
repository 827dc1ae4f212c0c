"""A notebook and its text twin (jupytext, percent format): compared cell by cell, or one made from the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspec_lab.core.files import write_text
from dspec_lab.nbtools.contents import load_notebook

FORMAT = "py:percent"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def twin_of(notebook: Path) -> Path:
    """`notebooks/text/NN_slug.py` for `notebooks/NN_slug.ipynb`."""
    return notebook.parent / "text" / f"{notebook.stem}.py"


def notebook_of(twin: Path) -> Path:
    """`notebooks/NN_slug.ipynb` for `notebooks/text/NN_slug.py`."""
    return twin.parent.parent / f"{twin.stem}.ipynb"


def differences(notebook: Path) -> list[str]:
    """How the cells of `notebook` and its twin differ (kind, text, tags), in words; none when they agree."""
    twin = twin_of(notebook)
    if not twin.is_file():
        return [f"{notebook.name} has no twin {twin.parent.name}/{twin.name}"]
    ours = [_essence(cell) for cell in load_notebook(notebook)["cells"]]
    theirs = [_essence(cell) for cell in _read_twin(twin)["cells"]]
    found = []
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
        for what, one, other in zip(("kind", "text", "tags"), our, their, strict=True):
            if one != other:
                found.append(f"{notebook.name}, cell {number}: {what} differs from {twin.name}")
    if len(ours) != len(theirs):
        found.append(f"{notebook.name} has {len(ours)} cells, {twin.name} has {len(theirs)}")
    return found


def orphan_twins(folder: Path) -> list[Path]:
    """Text twins in `folder` (notebooks/) whose notebook does not exist."""
    return [twin for twin in sorted((folder / "text").glob("*.py")) if not notebook_of(twin).is_file()]


def notebook_from_twin(twin: Path) -> Path:
    """The notebook written from `twin`, without outputs. Cells that were there before keep their ids."""
    import nbformat
    from jupytext.combine import combine_inputs_with_outputs

    path = notebook_of(twin)
    made = _read_twin(twin)
    made.nbformat, made.nbformat_minor = 4, 5
    if path.is_file():
        old = load_notebook(path)
        if (old.nbformat, old.nbformat_minor) != (4, 5):
            raise ValueError(f"{path} is in notebook format {old.nbformat}.{old.nbformat_minor}, not 4.5")
        made = combine_inputs_with_outputs(made, old, fmt=FORMAT)
    taken: set[str] = set()
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if cell.get("id") is None or cell["id"] in taken:
            cell["id"] = nbformat.v4.new_code_cell()["id"]
        taken.add(cell["id"])
    made.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    nbformat.validate(made)
    write_text(path, nbformat.writes(made) + "\n")
    return path


def twin_from_notebook(notebook: Path) -> Path:
    """The text twin written from `notebook`."""
    import jupytext

    content = load_notebook(notebook)
    content.metadata = type(content.metadata)({"kernelspec": KERNEL})
    return write_text(twin_of(notebook), jupytext.writes(content, fmt=FORMAT))


def _read_twin(twin: Path) -> Any:
    import jupytext

    return jupytext.read(twin, fmt=FORMAT)


def _essence(cell: Any) -> tuple[str, str, tuple[str, ...]]:
    # a percent file cannot keep blank lines at a cell's end
    return cell["cell_type"], cell["source"].rstrip("\n"), tuple(cell["metadata"].get("tags", []))
