"""Every notebook runs from top to bottom with the real model, in a fresh kernel, and shows its figures."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from dspec_lab.nbtools.contents import load_notebook
from dspec_lab.nbtools.parameters import read_params_file
from dspec_lab.nbtools.run import run_notebook

pytestmark = [pytest.mark.notebook, pytest.mark.model]

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def pixels(png: str) -> np.ndarray:
    from matplotlib.image import imread

    return imread(io.BytesIO(base64.b64decode(png)), format="png")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_figures(path, tmp_path, default_model_dir):
    values = read_params_file(FOLDER / "params" / "fast.yaml")[path.stem]
    before = path.read_bytes()
    result = run_notebook(path, tmp_path, values)
    assert result.error == ""
    assert path.read_bytes() == before
    outputs = [output for cell in load_notebook(result.output)["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    images = [pixels(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) >= 2
    # a blank picture has one colour
    assert all(len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 10 for image in images)
    # a panel is of no use without a front end: a figure comes with it
    views = [i for i, o in enumerate(outputs) if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert all("image/png" in outputs[i + 1].get("data", {}) for i in views)


@pytest.mark.parametrize(
    ("stem", "values", "message"),
    [
        ("00_first_run", {"drafter_names": ["oracle"]}, "unknown drafter 'oracle'"),
        ("00_first_run", {"gamma": 0}, "gamma must be at least 1, got 0"),
        ("01_why_lossless", {"mutant_names": ["none such"]}, "none such"),
    ],
)
def test_a_bad_parameter_fails_the_run_and_is_named(stem, values, message, tmp_path):
    result = run_notebook(FOLDER / f"{stem}.ipynb", tmp_path, values)
    assert not result.ok and message in result.error
    # found by the check of the parameters, before anything ran
    assert "cell 4" in result.error or "cell 5" in result.error
