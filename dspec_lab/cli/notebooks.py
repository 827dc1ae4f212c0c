"""`dspec notebooks`: run, lint, sync and list the notebooks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dspec_lab.cli.output import add_json_option, check_json_target, text_console, write_result


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the verb's parser to `subparsers`."""
    parser = subparsers.add_parser(
        "notebooks", help="run, check and list the notebooks", description="Run, check and list the notebooks."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_parser = _action(actions, "run", "execute notebooks as committed, with papermill; each failure is told")
    run_parser.add_argument("--params", default="fast", help="fast, full, or a YAML file {notebook: {name: value}}")
    run_parser.add_argument("--output", metavar="DIR", help="folder of the executed copies (default: runs/notebooks)")
    run_parser.add_argument("--figures", metavar="DIR", help="also write the images they show there, as NN_slug_k.png")
    run_parser.add_argument("--cell-timeout", type=int, default=600, metavar="S", help="time limit of a cell in s")
    _action(actions, "lint", "check form: parameters cell, lengths, no outputs, assertions, twins of panels")
    sync_parser = _action(actions, "sync", "make each notebook from its text twin; cells keep their ids")
    direction = sync_parser.add_mutually_exclusive_group()
    direction.add_argument("--check", action="store_true", help="only compare the two, cell by cell")
    direction.add_argument("--to-text", action="store_true", help="make each text twin from its notebook instead")
    _action(actions, "contents", "list the notebooks with the question each one asks")
    return parser


def _action(actions: Any, name: str, line: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
    parser.add_argument("names", nargs="*", metavar="NOTEBOOK", help="number or name, for example 00; all if none")
    parser.add_argument("--folder", metavar="DIR", help="the folder of notebooks (default: notebooks/ of the project)")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out the action; 0 when no notebook failed or had a fault."""
    check_json_target(args.json)
    from dspec_lab.nbtools.contents import find_notebooks, notebooks_dir

    folder = notebooks_dir(Path(args.folder) if args.folder else None)
    if args.action == "sync":
        return _sync(args, folder)
    return {"run": _run, "lint": _lint, "contents": _contents}[args.action](args, find_notebooks(folder, args.names))


def _run(args: argparse.Namespace, notebooks: list[Path]) -> int:
    from dspec_lab.bench.record import run_record
    from dspec_lab.nbtools.contents import find_notebooks, load_notebook
    from dspec_lab.nbtools.parameters import check_values, declared, read_params_file
    from dspec_lab.nbtools.run import extract_figures, run_notebook

    console = text_console(args.json)
    folder = notebooks[0].parent
    params = folder / "params" / f"{args.params}.yaml" if args.params in ("fast", "full") else Path(args.params)
    values = read_params_file(params)
    known = {path.stem: path for path in find_notebooks(folder)}
    for name in values:  # every name and type is checked before the first notebook runs
        if name not in known:
            raise ValueError(f"{params} names {name!r}; there are {', '.join(known)}")
        check_values(declared(load_notebook(known[name]), known[name].name), values[name], known[name].name)
    output = Path(args.output) if args.output else folder.parent / "runs" / "notebooks"
    rows = []
    for path in notebooks:
        console.print(f"running {path.name} ...", markup=False)
        result = run_notebook(path, output, values.get(path.stem), cell_timeout_s=args.cell_timeout)
        verdict = "ok" if result.ok else f"FAILED: {result.error}"
        console.print(f"{path.name}: {verdict} ({result.wall_s:.1f} s)", markup=False)
        figures = extract_figures(result.output, Path(args.figures)) if args.figures and result.ok else []
        row = {"notebook": path.name, "ok": result.ok, "error": result.error, "wall_s": round(result.wall_s, 3)}
        row |= {"output": str(result.output), "figures": [str(figure) for figure in figures]}
        rows.append(row | {"parameters": values.get(path.stem, {})})
    settings = {"params": str(params), "cell_timeout_s": args.cell_timeout}
    write_result(args.json, {"notebooks": rows, "run": run_record(settings, seed=None)})
    return 0 if all(row["ok"] for row in rows) else 1


def _lint(args: argparse.Namespace, notebooks: list[Path]) -> int:
    from dspec_lab.nbtools.lint import lint_notebook
    from dspec_lab.nbtools.sync import differences

    faults = {path.name: lint_notebook(path) + differences(path) for path in notebooks}
    return _tell_faults(args, faults, "fit to commit")


def _sync(args: argparse.Namespace, folder: Path) -> int:
    from dspec_lab.nbtools.contents import find_notebooks
    from dspec_lab.nbtools.sync import differences, notebook_from_twin, orphan_twins, twin_from_notebook, twin_of

    if args.check:
        faults = {path.name: differences(path) for path in find_notebooks(folder, args.names)}
        if not args.names:
            faults |= {twin.name: [f"{twin.name} has no notebook"] for twin in orphan_twins(folder)}
        return _tell_faults(args, faults, "the same as their twins")
    if args.to_text:
        written = [twin_from_notebook(path) for path in find_notebooks(folder, args.names) if differences(path)]
    else:
        new = [twin for twin in orphan_twins(folder) if not args.names or _named(twin, args.names)]
        old: list[Path] = []
        if any(folder.glob("*.ipynb")) and not (args.names and new):
            old = [twin_of(path) for path in find_notebooks(folder, args.names) if differences(path)]
        written = [notebook_from_twin(twin) for twin in (*old, *new)]
    text_console(args.json).print("\n".join(f"wrote {path}" for path in written) or "all the same", markup=False)
    write_result(args.json, {"written": [str(path) for path in written]})
    return 0


def _named(twin: Path, names: list[str]) -> bool:
    return any(Path(name).stem in (twin.stem, twin.stem.split("_")[0]) for name in names)


def _tell_faults(args: argparse.Namespace, faults: dict[str, list[str]], praise: str) -> int:
    console = text_console(args.json)
    count = sum(map(len, faults.values()))
    for line in (line for lines in faults.values() for line in lines):
        console.print(line, markup=False)
    console.print(f"{len(faults)} notebooks, {count} faults" if count else f"{len(faults)} notebooks {praise}")
    write_result(args.json, {"faults": faults})
    return 1 if count else 0


def _contents(args: argparse.Namespace, notebooks: list[Path]) -> int:
    from dspec_lab.nbtools.contents import contents

    entries = [entry for entry in contents(notebooks[0].parent) if entry.path in notebooks]
    console = text_console(args.json)
    for entry in entries:
        console.print(f"{entry.path.name}  {entry.title}\n    {entry.question}", markup=False)
    rows = [{"notebook": entry.path.name, "title": entry.title, "question": entry.question} for entry in entries]
    write_result(args.json, {"notebooks": rows})
    return 0
