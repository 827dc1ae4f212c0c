"""Every panel of notebooks 02, 03, 07, 08 and 11 in JupyterLab in a real browser: each control changes what is shown.

PANEL_TIMES=FILE also writes how long each change took, over more moves, from the first key or mouse event to the frame
with the new picture. Times are recorded, not asserted: they are those of the machine and of what else it does.
"""

from __future__ import annotations

import os
import statistics

import pytest

from dspec_lab.bench.record import run_record
from dspec_lab.core.files import write_json

pytestmark = [pytest.mark.browser, pytest.mark.model]

FAST = {
    "02_entropy_and_acceptance.ipynb": {"bins": 4},
    "03_position_decay.ipynb": {},
    "07_confidence.ipynb": {"synthetic_rounds_count": 12000, "resamples": 100},
    "08_the_prefix_scheduler.ipynb": {"timing_repeats": 20},
    "11_serving_under_load.ipynb": {"request_rounds": 8000},
}
# notebook: {a label that only this panel has: the panel's controls}; with each the key that moves a slider, None for a
# choice, "" for a number to type
PANELS = {
    "02_entropy_and_acceptance.ipynb": {
        "Entropy of": {"Trace": None, "Domain": None, "Entropy of": None, "Bins": "ArrowRight"},
        # the page first: filters may leave one page only
        "Request": {"Page": "", "Request": None, "Domain": None, "Show": None, "Threshold": "ArrowRight"},
    },
    "03_position_decay.ipynb": {
        "Draft length": {"Trace": None, "Domain": None, "Draft length": "ArrowLeft"},
    },
    "07_confidence.ipynb": {
        "Binning": {"Method": None, "Domain": None, "Binning": None, "Position": "ArrowRight", "Bins": "ArrowLeft"},
        "Confidences": {"Confidences": None, "Domain": None, "Threshold": "ArrowRight"},
    },
    "08_the_prefix_scheduler.ipynb": {
        "Cost": {"Cost": None, "Policy": None, "Requests": "ArrowRight", "Confidence": "ArrowLeft"},
    },
    "11_serving_under_load.ipynb": {
        "Seed": {"Policy": None, "Requests": "ArrowLeft", "Seed": "ArrowRight"},
    },
}  # fmt: skip
MOVES = 3  # of each control where times are recorded
# remembers the first event and the first frame after what the panel shows has changed
WATCH = """panel => {
  const shown = () => panel.querySelector('img')?.src ?? panel.querySelector('[role=group]').innerHTML;
  const before = shown(), seen = {asked: null, drawn: null}, stop = new AbortController();
  for (const kind of ['pointerdown', 'keydown', 'input', 'change'])
    panel.addEventListener(kind, () => { seen.asked ??= performance.now(); }, {capture: true, signal: stop.signal});
  const watcher = new MutationObserver(() => {
    if (seen.drawn !== null || shown() === before) return;
    watcher.disconnect(); stop.abort();
    requestAnimationFrame(() => { seen.drawn = performance.now(); });
  });
  watcher.observe(panel, {subtree: true, childList: true, attributes: true, characterData: true});
  window.seen = seen;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, default_model_dir, serve_notebooks):
    """(address, token) of a JupyterLab with the notebooks."""
    with serve_notebooks(FAST, tmp_path_factory.mktemp("lab")) as place:
        yield place


@pytest.fixture(scope="module")
def times() -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds of each move by notebook, panel and control."""
    return {}


def write_times(times) -> None:
    """Write the record so far to the file that PANEL_TIMES names."""
    rows = [
        {"notebook": name, "panel": mark, "control": label, "ms": [round(ms) for ms in spent],
         "ms_least": round(min(spent)), "ms_median": round(statistics.median(spent))}
        for (name, mark, label), spent in times.items()
    ]  # fmt: skip
    settings = {"load_average": round(os.getloadavg()[0], 2), "niceness": os.nice(0)}
    write_json(os.environ["PANEL_TIMES"], {"rows": rows, "run": run_record(settings, None)})


def move(page, panel, label: str, key: str | None, step: int) -> None:
    """Give the control its next value, as a person would."""
    control = panel.locator(".widget-inline-hbox", has=page.get_by_text(label, exact=True))
    if key is None:
        select = control.locator("select")
        count, now = select.evaluate("s => [s.options.length, s.selectedIndex]")
        select.select_option(index=(now + 1) % count)
    elif control.locator(".noUi-handle").count():
        control.locator(".noUi-handle").focus()
        page.keyboard.press(key)
    else:
        box = control.locator("input")
        box.fill(str(step + 2))
        box.press("Enter")


def put_back(page, panel, label: str) -> None:
    """Choose the first option again, and wait until that is shown."""
    select = panel.locator(".widget-inline-hbox", has=page.get_by_text(label, exact=True)).locator("select")
    if select.evaluate("s => s.selectedIndex") == 0:
        return
    panel.evaluate(WATCH)
    select.select_option(index=0)
    page.wait_for_function("() => window.seen.drawn !== null", timeout=60_000)
    panel.get_by_text("Up to date.", exact=True).wait_for(timeout=60_000)


@pytest.mark.parametrize("name", PANELS)
def test_every_control_changes_what_its_panel_shows(name, lab, chromium, chromium_options, run_notebook, times):
    from playwright.sync_api import TimeoutError as TooLong
    from playwright.sync_api import sync_playwright

    address, token = lab
    moves = MOVES if os.environ.get("PANEL_TIMES") else 1
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=chromium_options)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            run_notebook(page, f"{address}/doc/tree/{name}?token={token}")
            for mark, controls in PANELS[name].items():
                panel = page.locator(".widget-vbox", has=page.get_by_text(mark, exact=True)).last
                panel.scroll_into_view_if_needed()
                for label, key in controls.items():
                    for step in range(moves):
                        panel.evaluate(WATCH)
                        move(page, panel, label, key, step)
                        try:
                            page.wait_for_function("() => window.seen.drawn !== null", timeout=60_000)
                        except TooLong as error:
                            raise AssertionError(f"{name}: moving {label} beside {mark} changed nothing") from error
                        spent = page.evaluate("window.seen.drawn - window.seen.asked")
                        times.setdefault((name, mark, label), []).append(spent)
                        panel.get_by_text("Up to date.", exact=True).wait_for(timeout=60_000)
                    if key is None:
                        # one filter at a time: two together may leave nothing to show
                        put_back(page, panel, label)
                assert panel.locator('[role="alert"]').count() == 0
        finally:
            browser.close()
    if os.environ.get("PANEL_TIMES"):
        write_times(times)
