"""One file from a package index: resolved by pip, fetched with resume, checked against a pinned hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

# (what is being done, bytes done, bytes in all; 0 of 0 where there is nothing to count)
Progress = Callable[[str, int, int], None]

CHUNK_BYTES = 2**16  # what a dropped connection can lose at most
TRIES = 5  # in a row without one new byte
TIMEOUT_S = 60.0  # without a byte from the server


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelPin:
    """One released wheel, by name, size and hash."""

    requirement: str  # as pip takes it, for example "name==1.2"
    filename: str
    size: int  # bytes
    sha256: str


def fetch_wheel(pin: WheelPin, folder: Path, progress: Progress) -> Path:
    """Path of the checked wheel in `folder`. A partial file of an earlier call (`.part`) is gone on with.

    The address comes from pip, so the user's own index settings hold. Where pip cannot tell it or the transfer
    fails, pip downloads the file itself. A wheel with another hash raises ValueError and is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / pin.filename
    part = folder / (pin.filename + ".part")
    if not final.is_file():
        progress(f"asking pip where {pin.filename} is", 0, 0)
        try:
            url = resolve_url(pin)
            if urlparse(url).scheme == "file":
                shutil.copyfile(url2pathname(urlparse(url).path), part)
            else:
                download(url, part, size=pin.size, label=pin.filename, progress=progress)
        except OSError as error:
            progress(f"direct download failed ({error}); trying pip download", 0, 0)
            _pip_download(pin, part, error)
        os.replace(part, final)
    check_hash(final, pin, progress)
    return final


def check_hash(path: Path, pin: WheelPin, progress: Progress, *, remove: bool = True) -> None:
    """Raise ValueError, naming both hashes, unless `path` has the pinned one; a wrong file is removed if `remove`."""
    progress(f"checking {pin.filename}", 0, 0)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != pin.sha256:
        if remove:
            path.unlink()
        raise ValueError(
            f"{path} has sha256 {found}, expected {pin.sha256} for {pin.requirement}"
            + ("; the file was removed, run the command again" if remove else "")
        )


def resolve_url(pin: WheelPin) -> str:
    """Address from which pip would take the wheel; nothing is downloaded. OSError where pip cannot tell."""
    command = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", pin.requirement]
    report = _pip(command)
    try:
        (entry,) = json.loads(report)["install"]
        url = str(entry["download_info"]["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"pip gave no address for {pin.requirement}: {error!r}") from error
    if not urlparse(url).path.endswith("/" + pin.filename):
        raise OSError(f"pip would take {url.rsplit('/', 1)[-1]!r} for {pin.requirement}, not {pin.filename}")
    return url


def download(url: str, part: Path, *, size: int, label: str, progress: Progress) -> None:
    """Fill `part` up to `size` bytes from `url`, starting after the bytes it already has.

    A server that ignores the range sends all again, and `part` starts anew. A dropped connection is taken up
    again, up to `TRIES` times in a row without a new byte; then OSError. The content is not checked here.
    """
    import requests

    failures = 0
    while True:
        done = part.stat().st_size if part.exists() else 0
        if done > size:  # not a part of this file
            part.unlink()
            done = 0
        progress(label, done, size)
        if done == size:
            return
        try:
            _append(url, part, done, size, label, progress)
        except requests.HTTPError as error:
            raise OSError(f"{label}: {error}") from error
        except requests.RequestException as error:
            gained = (part.stat().st_size if part.exists() else 0) > done
            failures = 1 if gained else failures + 1
            if failures >= TRIES:
                raise OSError(f"{label}: {error}") from error
            progress(f"connection lost, trying again ({label})", 0, 0)
            time.sleep(min(8.0, 0.5 * 2**failures))


def _append(url: str, part: Path, done: int, size: int, label: str, progress: Progress) -> None:
    import requests

    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if response.status_code == 416:  # the part is no start of what the server has
            part.unlink(missing_ok=True)
            raise requests.ConnectionError(f"the server refused to go on at byte {done}")
        response.raise_for_status()
        resumed = response.status_code == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            raise requests.HTTPError(f"asked for bytes from {done}, got {response.headers.get('Content-Range')!r}")
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            for chunk in response.iter_content(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress(label, done, size)
                if done > size:
                    raise requests.HTTPError(f"more than the {size} bytes it should have")
    if done < size:
        raise requests.ConnectionError(f"the connection closed after {done} of {size} bytes")


def _pip_download(pin: WheelPin, part: Path, first_error: OSError) -> None:
    folder = part.parent / (pin.filename + ".pip")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _pip(["download", "--no-deps", "--quiet", "--dest", str(folder), pin.requirement])
        os.replace(folder / pin.filename, part)
    except OSError as error:
        raise OSError(f"cannot get {pin.requirement}: {first_error}; and pip download failed: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"pip {arguments[0]} {arguments[-1]} failed: {last}")
    return done.stdout
