"""A JupyterLab on this machine alone, and the Chromium that looks at it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
Serve: TypeAlias = Callable[[Mapping[str, Mapping[str, Any]], Path], AbstractContextManager[tuple[str, str]]]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of an installed Chromium."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[browser]')")
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed")
    return found


@pytest.fixture(scope="session")
def chromium_options() -> list[str]:
    """Options that Chromium needs to run here."""
    return ["--disable-gpu", *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]


@pytest.fixture(scope="session")
def serve_notebooks(chromium) -> Serve:
    """A function of {notebook: parameters} and an empty folder: a context with the (address, token) of a JupyterLab.

    It serves copies of the notebooks with these parameters, and has its own settings. `chromium` is asked for so that
    no server starts where nothing can look at it.
    """
    return _served


@contextmanager
def _served(notebooks: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[tuple[str, str]]:
    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    (folder / "notebooks").mkdir()
    for name, parameters in notebooks.items():
        source = Path(__file__).resolve().parents[2] / "notebooks" / name
        notebook = parameterize_notebook(load_notebook_node(str(source)), dict(parameters))
        nbformat.write(notebook, folder / "notebooks" / name)
    # all cells are in the page, also those out of sight
    tracker = folder / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    tracker.parent.mkdir(parents=True)
    tracker.write_text(json.dumps({"windowingMode": "none"}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    # an inherited MPLBACKEND would suppress figures
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    env |= {"JUPYTER_TOKEN": token, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    env |= {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    env |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1"]
    command += [
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder / 'notebooks'}",
    ]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/api", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}", token
    finally:
        # asked to end, the server ends its kernels first
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_it_answers(address: str, server: subprocess.Popen, log: Path) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if server.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {server.returncode}: {log.read_text()[-2000:]}") from None
            time.sleep(0.2)
    raise TimeoutError(f"no answer from JupyterLab: {log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def run_notebook() -> Callable[..., None]:
    """A function of a page and an address: opens the notebook there and runs all its cells, none of which may fail."""
    return _run_notebook


READY = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN = """() => { window.allRan = null; jupyterapp.commands.execute('notebook:run-all-cells')
  .then(ok => { window.allRan = String(ok); }, error => { window.allRan = String(error); }); }"""


def _run_notebook(page: Any, address: str) -> None:
    page.set_default_timeout(60_000)
    page.goto(address, timeout=120_000)
    page.wait_for_function(READY, timeout=180_000)
    page.evaluate(RUN)
    page.wait_for_function("() => window.allRan !== null", timeout=600_000)
    errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    if page.evaluate("window.allRan") != "true" or errors.count():
        told = errors.first.inner_text()[-500:] if errors.count() else ""
        raise RuntimeError(f"the cells did not all run: {page.evaluate('window.allRan')} {told}")
