"""The shell of the `dspec` command: exit statuses, one-line errors, clean JSON, and a quick --help."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dspec_lab import __version__
from dspec_lab.cli import main as shell
from dspec_lab.cli import output
from dspec_lab.models import fetch, model_folder


def dspec(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "dspec_lab.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
    )


@pytest.fixture
def tiny_cache(tmp_path, monkeypatch) -> Path:
    """DSPEC_CACHE with a model folder of a few bytes whose hashes match."""
    folder = tmp_path / "cache" / fetch.FOLDER
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    model_folder.write_manifest(folder, {"model": "tiny", "licence": "none", "source": "test"})
    monkeypatch.setenv("DSPEC_CACHE", str(folder.parent))
    return folder


@pytest.fixture
def planted_verb(monkeypatch):
    """Makes `dspec doctor` run the given function instead of its own."""

    def plant(run):
        def add_parser(subparsers):
            return subparsers.add_parser("doctor")

        planted = types.SimpleNamespace(add_parser=add_parser, run=run)
        monkeypatch.setattr(shell, "module", lambda _verb: planted)

    return plant


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nosuchverb"], "nosuchverb"),
        ([], "VERB"),
        (["fetch"], "model"),
        (["fetch", "gpt5"], "gpt5"),
        (["fetch", "smollm2", "--nosuch"], "--nosuch"),
        (["fetch", "smollm2", "--repl"], "--repl"),
        (["--nosuch", "doctor"], "--nosuch"),
        (["fetch", "smollm2", "--json"], "--json"),
        (["fetch", "smollm2", "--json", "no-such-folder/r.json"], "no-such-folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, named, tiny_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = shell.main(arguments)
    except SystemExit as stop:
        status = stop.code
    seen = capsys.readouterr()
    assert status == 2
    assert seen.out == ""
    assert seen.err.startswith("dspec: error: ") and seen.err.count("\n") == 1 and named in seen.err


def test_version_and_help_name_the_verbs(capsys):
    with pytest.raises(SystemExit, match="0"):
        shell.main(["--version"])
    assert capsys.readouterr().out == f"dspec_lab {__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        shell.main(["--help"])
    text = capsys.readouterr().out
    for verb, _ in shell.available_verbs():
        assert f"\n    {verb}" in text


def test_every_verb_builds_its_parser_and_has_json():
    for verb, _ in shell.available_verbs():
        action = next(a for a in shell.build_parser(verb)._actions if isinstance(a, argparse._SubParsersAction))
        parser = action.choices[verb]
        nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for leaf in nested[0].choices.values() if nested else [parser]:
            assert "--json" in leaf._option_string_actions, f"{leaf.prog} has no --json"
            assert not leaf.allow_abbrev, f"{leaf.prog} takes shortened options"


def test_an_error_of_the_work_is_one_line_unless_debug(planted_verb, capsys):
    def run(_args):
        raise ValueError("gamma must be at least 1,\n  got 0")

    planted_verb(run)
    assert shell.main(["doctor"]) == 2
    assert capsys.readouterr().err == "dspec: error: gamma must be at least 1, got 0\n"
    for arguments in (["--debug", "doctor"], ["doctor", "--debug"]):
        with pytest.raises(ValueError, match="gamma"):
            shell.main(arguments)


def test_a_missing_file_is_named(planted_verb, capsys, tmp_path):
    planted_verb(lambda _args: int((tmp_path / "none.jsonl").read_text()))
    assert shell.main(["doctor"]) == 2
    assert capsys.readouterr().err == f"dspec: error: {tmp_path}/none.jsonl: No such file or directory\n"


def test_a_fault_of_the_program_is_not_dressed_up_as_bad_input(planted_verb):
    def run(_args):
        raise RuntimeError("a bug")

    planted_verb(run)
    with pytest.raises(RuntimeError, match="a bug"):
        shell.main(["doctor"])


def test_ctrl_c_exits_130(planted_verb, capsys):
    def run(_args):
        raise KeyboardInterrupt

    planted_verb(run)
    assert shell.main(["doctor"]) == 130
    assert capsys.readouterr().err == "dspec: stopped\n"


def test_the_status_of_the_verb_is_the_exit_status(planted_verb):
    for status in (0, 1):
        planted_verb(lambda _args, status=status: status)
        assert shell.main(["doctor"]) == status


def test_fetch_prints_json_alone_on_standard_output(tiny_cache):
    done = dspec("fetch", "smollm2", "--json", "-", DSPEC_CACHE=str(tiny_cache.parent))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["folder"] == str(tiny_cache) and result["was_there"] is True and result["source"] == "test"
    assert result["run"]["settings"] == {"model": "smollm2", "replace": False}
    assert result["run"]["versions"]["dspec_lab"] == __version__
    assert "hashes match" in done.stderr


def test_fetch_writes_json_to_a_file_and_text_to_standard_output(tiny_cache, tmp_path, capsys):
    assert shell.main(["fetch", "smollm2", "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["model"] == fetch.MODEL
    assert "hashes match" in capsys.readouterr().out


def test_a_corrupt_model_is_one_line_and_exit_2_and_writes_nothing(tiny_cache, tmp_path, capsys):
    (tiny_cache / "model.safetensors").write_bytes(b"weighty")
    assert shell.main(["fetch", "smollm2", "--json", str(tmp_path / "r.json")]) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("dspec: error: ") and seen.err.count("\n") == 1 and "model.safetensors" in seen.err
    assert seen.out == "" and not (tmp_path / "r.json").exists()


def test_doctor_tells_a_missing_and_a_corrupt_model(tiny_cache, tmp_path, monkeypatch, capsys):
    assert shell.main(["doctor", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert report["can_run"] is True and status["packages"] == status["model"] == status["torch"] == "ok"
    assert set(next(c for c in report["checks"] if c["name"] == "formats")["values"]["lm_head_8_rows_ms"]) == {
        "fp32",
        "bf16",
        "fp16",
    }
    (tiny_cache / "model.safetensors").write_bytes(b"weighty")
    assert shell.main(["doctor"]) == 1
    assert "model.safetensors is corrupt" in capsys.readouterr().out
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "empty"))
    assert shell.main(["doctor"]) == 1
    assert "dspec fetch smollm2" in capsys.readouterr().out
    assert not (tmp_path / "empty").exists()


def test_help_is_quick_because_nothing_heavy_is_loaded():
    code = (
        "import sys\n"
        "from dspec_lab.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]", done.stderr


def test_progress_off_a_terminal_is_one_line_a_tenth(capsys):
    with output.ConsoleProgress() as progress:
        for done in range(0, 1001):
            progress("file", done * 10**6, 1000 * 10**6)
        progress("checking file", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[0] == "file: 0.0 of 1000.0 MB" and lines[10] == "file: 1000.0 of 1000.0 MB"
    assert lines[11] == "checking file"
