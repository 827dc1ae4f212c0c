"""Notebook 00 in JupyterLab in a real, headless browser: a moved slider changes the picture."""

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
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.model]

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_first_run.ipynb"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FAST = {"max_new_tokens": 12, "repeats": 1, "drafter_names": ["prompt_lookup"], "prompt_sets": ["humaneval_style"]}
READY = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN = """() => { window.allRan = null; jupyterapp.commands.execute('notebook:run-all-cells')
  .then(ok => { window.allRan = String(ok); }, error => { window.allRan = String(error); }); }"""
PICTURE = '.jupyter-widgets img[alt*="Tokens gained"]'


@pytest.fixture(scope="module")
def chromium() -> str:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[browser]')")
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed")
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory, default_model_dir, chromium):
    """(address, token) of a JupyterLab on this machine alone, with a short copy of the notebook and own settings."""
    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    notebook = parameterize_notebook(load_notebook_node(str(NOTEBOOK)), FAST)
    nbformat.write(notebook, folder / "notebooks" / NOTEBOOK.name)
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
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)
    raise AssertionError(f"no answer from JupyterLab: {log.read_text()[-2000:]}")


def test_without_the_token_there_is_no_way_in(lab):
    address, token = lab
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}/api/contents", timeout=30)
    assert refused.value.code == 403
    assert urllib.request.urlopen(f"{address}/api/contents?token={token}", timeout=30).status == 200


def test_moving_the_draft_length_changes_the_picture(lab, chromium):
    from playwright.sync_api import sync_playwright

    address, token = lab
    options = ["--disable-gpu", *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=options)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            page.set_default_timeout(60_000)
            page.goto(f"{address}/doc/tree/{NOTEBOOK.name}?token={token}", timeout=120_000)
            page.wait_for_function(READY, timeout=180_000)
            page.evaluate(RUN)
            page.wait_for_function("() => window.allRan !== null", timeout=600_000)
            assert page.evaluate("window.allRan") == "true"
            assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
            picture = page.locator(PICTURE)
            picture.wait_for(timeout=60_000)
            before, described = picture.get_attribute("src"), picture.get_attribute("alt")
            slider = page.locator(".widget-slider", has_text="Draft length")
            handle = slider.locator(".noUi-handle")
            assert handle.get_attribute("aria-valuenow") == "5.0"
            handle.focus()
            page.keyboard.press("ArrowLeft")
            changed = "([where, old]) => document.querySelector(where).src !== old"
            page.wait_for_function(changed, arg=[PICTURE, before], timeout=120_000)
            assert "draft length 5" in described and "draft length 4" in picture.get_attribute("alt")
            assert slider.locator(".widget-readout").inner_text().strip() == "4"
            page.wait_for_function("() => document.body.innerText.includes('Up to date.')", timeout=60_000)
        finally:
            browser.close()
