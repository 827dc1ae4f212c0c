"""Notebook 00 in JupyterLab in a real, headless browser: a moved slider changes the picture."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.model]

NOTEBOOK = "00_first_run.ipynb"
FAST = {"max_new_tokens": 12, "repeats": 1, "drafter_names": ["prompt_lookup"], "prompt_sets": ["humaneval_style"]}
PICTURE = '.jupyter-widgets img[alt*="Tokens gained"]'


@pytest.fixture(scope="module")
def lab(tmp_path_factory, default_model_dir, serve_notebooks):
    """(address, token) of a JupyterLab with a short copy of the notebook."""
    with serve_notebooks({NOTEBOOK: FAST}, tmp_path_factory.mktemp("lab")) as place:
        yield place


def test_without_the_token_there_is_no_way_in(lab):
    address, token = lab
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{address}/api/contents", timeout=30)
    assert refused.value.code == 403
    assert urllib.request.urlopen(f"{address}/api/contents?token={token}", timeout=30).status == 200


def test_moving_the_draft_length_changes_the_picture(lab, chromium, chromium_options, run_notebook):
    from playwright.sync_api import sync_playwright

    address, token = lab
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=chromium_options)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            run_notebook(page, f"{address}/doc/tree/{NOTEBOOK}?token={token}")
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
