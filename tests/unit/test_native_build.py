"""How the compiled row ops come about, and what is said where they do not."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import torch

from dspec_lab.kernels import native_rows
from dspec_lab.kernels.rows import native_status, row_ops

COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder, no compiler named, and nothing remembered of earlier builds."""
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_rows, "FLAGS", ("-O0", *native_rows.FLAGS[1:]))  # compiles in a second
    native_rows.build.cache_clear()
    yield
    native_rows.build.cache_clear()


def compiler_that(folder: Path, refuses: str, monkeypatch) -> Path:
    """Name a compiler by CC that fails where an argument holds `refuses` ("" refuses nothing); its log of calls."""
    log, script = folder / "calls", folder / "compiler"
    error = f'echo "compiler: error: unknown {refuses}" >&2; exit 1'
    refuse = f'case "$*" in *{refuses}*) {error};; esac' if refuses else ""
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{refuse}\nexec {COMPILER} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    log.write_text("")
    monkeypatch.setenv("CC", str(script))
    return log


def libraries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "native").iterdir())


def works() -> bool:
    x_NK, weight_OK = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    return torch.equal(row_ops("native").linear(x_NK, weight_OK), x_NK @ weight_OK.T)


def falls_back(*, saying: str) -> None:
    here, why = native_status()
    assert not here and saying in why and "\n" not in why
    assert row_ops("auto").name == "torch"
    with pytest.raises(RuntimeError, match="not available") as caught:
        row_ops("native")
    assert saying in str(caught.value)


def test_without_a_compiler_torch_takes_over_and_the_status_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    falls_back(saying="no C compiler was found (set CC, or install gcc or clang)")


def test_a_compiler_named_by_cc_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CC", "nosuchcc -O2")
    falls_back(saying="CC=nosuchcc was not found")


def test_a_model_runs_without_the_compiled_ops(monkeypatch):
    from dspec_lab.models.load import choose_dtype, load_target

    monkeypatch.setenv("CC", "nosuchcc")
    folder = Path(__file__).parents[1] / "parity" / "vectors" / "target_gemma4" / "checkpoint"
    target = load_target(folder, "auto")
    assert target.ops.name == "torch" and target.dtype == torch.float32
    assert "CC=nosuchcc was not found" in choose_dtype("auto").why
    with pytest.raises(RuntimeError, match="CC=nosuchcc was not found"):
        load_target(folder, "fp32", impl="native")


@needs_compiler
def test_built_once_and_again_when_the_source_changes(monkeypatch, tmp_path):
    source = tmp_path / "rows.c"
    shutil.copyfile(native_rows.SOURCE, source)
    monkeypatch.setattr(native_rows, "SOURCE", source)
    log = compiler_that(tmp_path, "", monkeypatch)
    assert works()
    first = libraries(tmp_path)
    assert len(first) == 1 and len(log.read_text().splitlines()) == 1
    native_rows.build.cache_clear()
    assert works()
    assert libraries(tmp_path) == first and len(log.read_text().splitlines()) == 1
    source.write_text(source.read_text() + "\n/* changed */\n")
    native_rows.build.cache_clear()
    assert works()
    assert len(libraries(tmp_path)) == 2 and len(log.read_text().splitlines()) == 2


@needs_compiler
def test_another_compiler_builds_its_own(monkeypatch, tmp_path):
    assert works()
    compiler_that(tmp_path, "", monkeypatch)
    native_rows.build.cache_clear()
    assert works()
    assert len(libraries(tmp_path)) == 2
    here, how = native_status()
    assert here and how.startswith(f"compiled by {tmp_path / 'compiler'}, products of ")


@needs_compiler
def test_a_broken_source_gives_the_compilers_message(monkeypatch, tmp_path):
    source = tmp_path / "rows.c"
    source.write_text("int f(void) { return missing_name; }\n")
    monkeypatch.setattr(native_rows, "SOURCE", source)
    falls_back(saying="missing_name")
    assert "could not build rows.c" in native_status()[1] and "error" in native_status()[1]
    assert libraries(tmp_path) == []


@needs_compiler
@pytest.mark.parametrize("refused", ["-fopenmp", "-march=native"])
def test_a_compiler_that_lacks_a_flag_builds_without_it(monkeypatch, tmp_path, refused):
    log = compiler_that(tmp_path, refused, monkeypatch)
    assert works()
    last = log.read_text().splitlines()[-1]
    assert refused not in last and "-ffp-contract=off" in last
    assert ("for one thread" in native_status()[1]) == ("-fopenmp" not in last)


@needs_compiler
def test_a_library_that_does_not_load_is_named(monkeypatch, tmp_path):
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor word; do [ "$before" = -o ] && echo no library > "$word"; before=$word; done\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(script))
    falls_back(saying="does not load")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "file"))
    if COMPILER is None:
        pytest.skip("no C compiler here")
    falls_back(saying=str(tmp_path / "file"))


@needs_compiler
def test_the_native_ops_are_for_the_cpu():
    with pytest.raises(ValueError, match="not on meta"):
        row_ops("native", "meta")
    assert row_ops("auto", "meta").name == "torch"
