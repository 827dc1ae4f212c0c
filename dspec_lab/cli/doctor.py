"""`dspec doctor`: can this machine do the main job, how fast are its number formats, and what is missing?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TEST_MODULES = ("pytest", "pytest_timeout", "hypothesis", "beartype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report. A `needed` check that is `bad` stops the main job."""

    name: str
    status: Literal["ok", "none", "bad"]  # none: not there, and not needed
    detail: str
    needed: bool = False
    values: dict[str, Any] | None = None


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, or a drafter's checkpoint",
        description="Check this machine. Exit status 0 when the main job (dspec demo) can run, 1 when it cannot. With "
        "a checkpoint: find faults in its files and, where the target is at hand, in how it reads it; 1 if there are.",
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="folder of a drafter's checkpoint")
    parser.add_argument(
        "--target", default="smollm2", help="the checkpoint's target: smollm2 (default) or a model folder"
    )
    parser.add_argument("--no-probe", action="store_true", help="do not run the checkpoint on its target")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print every check; 0 when nothing that the main job needs is bad."""
    if args.checkpoint is not None:
        from dspec_lab.cli import doctor_checkpoint

        return doctor_checkpoint.run(args)
    check_json_target(args.json)
    console = text_console(args.json)
    checks = [check_packages()]
    if importlib.util.find_spec("torch") is not None:
        checks += [check_torch(), check_formats(), check_gpu()]
    checks += [check_triton(), check_model(), check_jupyter(), check_test_extra(), check_browser()]
    for check in checks:
        mark = {"ok": "[green]ok  [/]", "none": "[yellow]none[/]", "bad": "[red]bad [/]"}[check.status]
        console.print(f"{mark} {check.name:<9}", end=" ")
        console.print(check.detail, markup=False)
    healthy = not any(check.needed and check.status == "bad" for check in checks)
    console.print("the main job can run" if healthy else "the main job cannot run: see the lines marked bad")
    from dspec_lab.bench.record import run_record

    rows = [asdict(check) for check in checks]
    write_result(args.json, {"can_run": healthy, "checks": rows, "run": run_record({}, seed=None)})
    return 0 if healthy else 1


def check_packages() -> Check:
    """Are all packages that pyproject.toml names there, in a version it allows?"""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("dspec_lab") or []
    except metadata.PackageNotFoundError:
        detail = "dspec_lab is not installed in this environment; run: make setup"
        return Check(name="packages", status="bad", detail=detail, needed=True)
    wrong = []
    wanted = [Requirement(line) for line in lines]
    base = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in base:
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{need.name} is missing")
            continue
        if not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found} is not {need.specifier}")
    python = ".".join(map(str, sys.version_info[:3]))
    if wrong:
        detail = f"Python {python}; {'; '.join(wrong)}; run: make setup"
        return Check(name="packages", status="bad", detail=detail, needed=True)
    detail = f"Python {python}, all {len(base)} packages, transformers {metadata.version('transformers')}"
    return Check(name="packages", status="ok", detail=detail, needed=True)


def check_torch() -> Check:
    """torch, its threads, and the vector instructions it uses."""
    import torch

    from dspec_lab.bench.record import cpu_name, usable_cores

    threads, cores = torch.get_num_threads(), usable_cores()
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{torch.__version__}, {threads} threads on {cores} cores ({cpu_name()}, {capability})"
    values = {"threads": threads, "cores": cores, "capability": capability}
    return Check(name="torch", status="ok", detail=detail, needed=True, values=values)


def check_formats() -> Check:
    """Time of one matrix product of the default model's shape per number format, on this CPU, in ms."""
    import torch

    times_ms = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rows_JD = torch.ones(8, 576, dtype=dtype)
        weight_VD = torch.ones(49152, 576, dtype=dtype)
        spans_s = []
        for _ in range(5):
            start = time.perf_counter()
            torch.nn.functional.linear(rows_JD, weight_VD)
            spans_s.append(time.perf_counter() - start)
        times_ms[name] = round(1e3 * statistics.median(spans_s[1:]), 2)
    fastest = min(times_ms, key=lambda name: times_ms[name])
    listed = ", ".join(f"{name} {span} ms" for name, span in times_ms.items())
    detail = f"LM head over 8 rows: {listed}; fastest {fastest}"
    return Check(name="formats", status="ok", detail=detail, values={"lm_head_8_rows_ms": times_ms, "fastest": fastest})


def check_gpu() -> Check:
    """The CUDA device, if torch sees one."""
    import torch

    if not torch.cuda.is_available():
        return Check(name="gpu", status="none", detail="no CUDA device; everything runs on the CPU")
    about = torch.cuda.get_device_properties(0)
    detail = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
    return Check(name="gpu", status="ok", detail=detail)


def check_triton() -> Check:
    """Triton, which only the GPU kernels use."""
    if importlib.util.find_spec("triton") is None:
        return Check(name="triton", status="none", detail="not installed; the torch form of every kernel is used")
    return Check(name="triton", status="ok", detail=metadata.version("triton"))


def check_model() -> Check:
    """Is the default model in the cache, whole and unchanged?"""
    from dspec_lab.models.fetch import default_model_folder
    from dspec_lab.models.model_folder import check_folder

    folder = default_model_folder()
    if not folder.is_dir():
        free = shutil.disk_usage(next(up for up in folder.parents if up.is_dir())).free
        detail = f"not in {folder.parent} ({free / 1e9:.0f} GB free there); run: dspec fetch smollm2"
        return Check(name="model", status="bad", detail=detail, needed=True)
    try:
        manifest = check_folder(folder)
    except (ValueError, OSError) as error:
        detail = f"{error}; run: dspec fetch smollm2 --replace"
        return Check(name="model", status="bad", detail=detail, needed=True)
    detail = f"{manifest['model']} in {folder}, hashes match, from {manifest['source']}"
    return Check(name="model", status="ok", detail=detail, needed=True)


def check_jupyter() -> Check:
    """JupyterLab, papermill, and a kernel of this very Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Check(name="jupyter", status="bad", detail="no kernel named python3; run: make setup")
    # jupyter starts its own Python for these bare names
    if os.path.isabs(command) and os.path.realpath(command) != os.path.realpath(sys.executable):
        detail = f"the kernel python3 starts {command}, not {sys.executable}"
        return Check(name="jupyter", status="bad", detail=detail)
    detail = f"jupyterlab {metadata.version('jupyterlab')}, papermill {metadata.version('papermill')}, kernel python3"
    return Check(name="jupyter", status="ok", detail=detail)


def check_test_extra() -> Check:
    """What `make test` needs beside the program."""
    missing = [name for name in TEST_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return Check(name="tests", status="none", detail=f"no {', '.join(missing)}; make test installs them")
    return Check(name="tests", status="ok", detail="extra test is installed")


def check_browser() -> Check:
    """Chromium and playwright, which only the browser tests of the panels use."""
    program = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    playwright = importlib.util.find_spec("playwright") is not None
    if program and playwright:
        return Check(name="browser", status="ok", detail=program)
    lacking = [*([] if program else ["Chromium"]), *([] if playwright else ["playwright (extra browser)"])]
    return Check(name="browser", status="none", detail=f"no {' and no '.join(lacking)}; browser tests are skipped")
