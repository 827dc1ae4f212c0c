"""Files and folders appear whole or not at all; the data and cache folders are found where they should be."""

from __future__ import annotations

import os
import stat

import pytest

from dspec_lab.core import files


def test_writers_round_trip_and_make_parents(tmp_path):
    path = files.write_json(tmp_path / "a" / "b.json", {"one": [1, 2.5, None], "ü": True})
    assert files.read_json(path) == {"one": [1, 2.5, None], "ü": True}
    assert files.write_text(path, "x\n").read_bytes() == b"x\n"
    assert files.write_bytes(path, b"\x00\xff").read_bytes() == b"\x00\xff"
    assert os.listdir(path.parent) == ["b.json"]


def test_an_interrupted_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = files.write_text(tmp_path / "kept.txt", "old")

    def broken_disk(_handle):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", broken_disk)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["kept.txt"]


def test_json_refuses_nan_before_it_touches_the_file(tmp_path):
    path = files.write_text(tmp_path / "r.json", "old")
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"tau": float("nan")})
    assert path.read_text() == "old"


def test_a_written_file_has_the_users_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    written = files.write_text(tmp_path / "written", "")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_unreadable_json_is_named(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json is not JSON"):
        files.read_json(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.json is not UTF-8"):
        files.read_json(bad)


def test_writing_onto_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        files.write_text(tmp_path, "x")


def test_new_folder_appears_only_when_its_block_ends_well(tmp_path):
    final = tmp_path / "model"
    with files.new_folder(final) as building:
        (building / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"
    with pytest.raises(KeyboardInterrupt), files.new_folder(final) as building:
        (building / "a").write_text("2")
        raise KeyboardInterrupt
    assert (final / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["model"]


def test_new_folder_replaces_the_old_one_as_a_whole(tmp_path):
    final = tmp_path / "model"
    final.mkdir()
    (final / "stale").write_text("")
    with files.new_folder(final) as building:
        (building / "fresh").write_text("")
    assert os.listdir(final) == ["fresh"]
    assert os.listdir(tmp_path) == ["model"]


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    for name in (".model.abc.tmp", ".model.def.old", ".other.abc.tmp", "model"):
        (tmp_path / name).mkdir()
    removed = files.remove_leftovers(tmp_path / "model")
    assert sorted(path.name for path in removed) == [".model.abc.tmp", ".model.def.old"]
    assert sorted(os.listdir(tmp_path)) == [".other.abc.tmp", "model"]


def test_cache_dir_follows_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPEC_CACHE", str(tmp_path / "c"))
    assert files.cache_dir() == tmp_path / "c"
    monkeypatch.delenv("DSPEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / ".cache" / "dspec_lab"


def test_data_dir_follows_its_variable_and_names_a_wrong_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path))
    assert files.data_dir() == tmp_path
    monkeypatch.setenv("DSPEC_DATA", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="DSPEC_DATA=.*none is not a folder"):
        files.data_dir()


def test_data_dir_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("DSPEC_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (files.data_dir() / "prompts").is_dir()
