"""The three lists of packages say the same: pyproject.toml, environment.yml (conda), constraints.txt (pins)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def conda_list() -> dict[str, SpecifierSet]:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    lines = [line for line in content["dependencies"] if isinstance(line, str)]
    found = {}
    for line in lines:
        name, specifier = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups()
        assert name not in found, f"{name} is listed twice"
        found[name] = SpecifierSet(specifier)
    return found


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in pairs}


def test_environment_yml_lists_what_pyproject_lists():
    about = project()
    wanted = [Requirement(line) for line in about["dependencies"] + about["optional-dependencies"]["test"]]
    # Triton is for one platform only, which the conda file cannot say; the program runs without it
    wanted = [need for need in wanted if need.marker is None]
    expected = {CONDA_NAMES.get(need.name, need.name): need.specifier for need in wanted}
    found = conda_list()
    assert found.pop("python") == SpecifierSet(about["requires-python"])
    assert found.pop("pip") == SpecifierSet("")
    assert found == expected


def test_environment_yml_installs_the_project_itself():
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert content["name"] == "dspec_lab"
    (by_pip,) = [line["pip"] for line in content["dependencies"] if isinstance(line, dict)]
    assert by_pip == ["-e ."]


def test_every_direct_dependency_is_pinned_within_its_range():
    about = project()
    lines = about["dependencies"] + [line for extra in about["optional-dependencies"].values() for line in extra]
    needs = {need.name.lower(): need for need in map(Requirement, lines)}
    pinned = pins()
    assert set(pinned) == set(needs)
    for name, version in pinned.items():
        assert needs[name].specifier.contains(version), f"{name} is pinned to {version}, outside {needs[name]}"


def test_torch_and_transformers_ranges_are_those_the_code_is_written_for():
    needs = {need.name: need.specifier for need in map(Requirement, project()["dependencies"])}
    assert needs["torch"] == SpecifierSet(">=2.11,<2.14")
    assert needs["transformers"] == SpecifierSet(">=5.13,<6")
    assert pins()["torch"] == Version("2.13.0")


@pytest.mark.parametrize("name", ["Makefile", ".ci/run", "LICENSE", "environment.yml", "constraints.txt"])
def test_no_address_or_machine_path_is_written_into_the_set_up(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|/root/|/home/|/tmp/", text)
