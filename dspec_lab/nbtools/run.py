"""Notebooks executed as committed, without a browser: papermill, made strict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspec_lab.nbtools.contents import load_notebook
from dspec_lab.nbtools.parameters import check_values, declared

CELL_TIMEOUT_S = 600
START_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What became of one notebook. `error` is empty when every cell ran."""

    notebook: str
    output: Path
    wall_s: float
    num_code_cells: int
    error: str

    @property
    def ok(self) -> bool:
        """True when every cell ran to its end."""
        return not self.error


def run_notebook(
    path: Path,
    output_dir: Path,
    values: Mapping[str, Any] | None = None,
    *,
    cell_timeout_s: int = CELL_TIMEOUT_S,
) -> RunResult:
    """Run `path` in a fresh kernel, in the folder it lies in, and write the executed copy to `output_dir`.

    `values` replace defaults of the parameters cell; a name or type it does not declare raises ValueError before
    anything runs. An exception, a cell over its time, a dead kernel and a cell that never ran are failures, told in
    the result's `error`. The notebook itself is not changed.
    """
    if cell_timeout_s < 1:
        raise ValueError(f"the time limit of a cell must be at least 1 s, got {cell_timeout_s}")
    values = dict(values or {})
    check_values(declared(load_notebook(path), path.name), values, path.name)
    output_dir.mkdir(parents=True, exist_ok=True)
    output = output_dir / path.name
    if output.resolve() == path.resolve():
        raise ValueError(f"{output_dir} is the folder of {path.name} itself; give another folder for the executed copy")
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    error = _execute(path, output, values, cell_timeout_s)
    wall_s = time.perf_counter() - start
    executed = load_notebook(output if output.is_file() else path)
    code = [cell for cell in executed["cells"] if cell["cell_type"] == "code" and cell["source"].strip()]
    return RunResult(
        notebook=path.name,
        output=output,
        wall_s=wall_s,
        num_code_cells=len(code),
        error=error or _unfinished(code),
    )


def _execute(path: Path, output: Path, values: dict[str, Any], cell_timeout_s: int) -> str:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillException, PapermillExecutionError

    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters=values,
            cwd=str(path.parent),
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            start_timeout=START_TIMEOUT_S,
            execution_timeout=cell_timeout_s,
            raise_on_iopub_timeout=True,
        )
    except PapermillExecutionError as error:
        return f"cell {error.cell_index + 1}: {error.ename}: {error.evalue}"
    except CellTimeoutError:
        return f"a cell ran longer than {cell_timeout_s} s"
    except DeadKernelError as error:
        return f"the kernel died: {error}"
    except (PapermillException, RuntimeError, TimeoutError) as error:  # the kernel did not start or stopped answering
        return f"{type(error).__name__}: {error}"
    return ""


def _unfinished(code: list[Any]) -> str:
    for number, cell in enumerate(code, 1):
        failed = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
        if failed:
            return f"code cell {number}: {failed[0]['ename']}: {failed[0]['evalue']}"
        if cell.get("execution_count") is None:
            return f"code cell {number} of {len(code)} did not run"
    return ""


def extract_figures(executed: Path, folder: Path) -> list[Path]:
    """PNG files made from the images a run left in `executed`: `NN_slug_1.png` and on, in the order shown."""
    import base64

    from dspec_lab.core.files import write_bytes

    written: list[Path] = []
    for cell in load_notebook(executed)["cells"]:
        for output in cell.get("outputs", []):
            image = output.get("data", {}).get("image/png")
            if image:
                name = f"{executed.stem}_{len(written) + 1}.png"
                written.append(write_bytes(folder / name, base64.b64decode(image)))
    return written
