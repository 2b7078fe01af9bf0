"""The report in a real browser: what is seen, and what a click does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_xla

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, of extra [dev], drives the browser")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --window-size=1280,1000""".split()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a loop with a ragged batch, a read and an operator on the host."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).to("xla")
    warm = torch.ones(8, device="xla").softmax(0) + 1
    torch_xla.sync()  # what a process does once is no part of the first step
    del warm
    with torch_xla.debug.profile() as profiled:
        for i in range(6):
            batch = torch.ones(3 if i == 5 else 4, 8).to("xla")
            loss = model(batch).sum()
            torch_xla.sync()
            assert loss.item() < 1e9
        torch.nonzero(loss)
    path = tmp_path_factory.mktemp("page") / "report.html"
    profiled.save(path)
    return path


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in OPTIONS:
        options.add_argument(option)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(autouse=True)
def opened(browser: Any, page: Path) -> Iterator[None]:
    browser.get(page.as_uri())
    until(lambda: view(browser))
    yield
    assert browser.get_log("browser") == []


def until(condition: Callable[[], Any]) -> Any:
    """Waits for the next frame that the browser draws."""
    for _ in range(200):
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("it did not happen within ten seconds")


def view(browser: Any) -> str:
    return browser.execute_script("return document.body.dataset.view || ''")


def picture(browser: Any, canvas: str = "lanes") -> str:
    return browser.execute_script(f"return document.getElementById('{canvas}').toDataURL()")


def changes_view(browser: Any, action: Callable[[], object]) -> tuple[int, int]:
    before = view(browser)
    action()
    until(lambda: view(browser) != before)
    start, end = map(int, view(browser).split())
    return start, end


def changes_picture(browser: Any, action: Callable[[], object]) -> None:
    before = picture(browser)
    action()
    until(lambda: picture(browser) != before)


def test_it_needs_nothing_else(browser: Any) -> None:
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_first_sight(browser: Any) -> None:
    text = browser.find_element(By.ID, "findings").text
    assert "compiled again" in text and "float32[4, 8] to float32[3, 8]" in text
    assert "aten::nonzero ran on the host once" in text and "6 values read" in text
    assert "% busy" in browser.find_element(By.ID, "causes").text
    for canvas in ("steps", "lanes", "live"):
        assert len(picture(browser, canvas)) > 1000


def test_moving_about(browser: Any) -> None:
    start, whole = map(int, view(browser).split())
    assert start == 0
    for button in ("typical", "zoom-in", "zoom-out", "left", "slowest", "whole"):
        start, end = changes_view(browser, browser.find_element(By.ID, button).click)
        assert 0 <= start < end <= whole
    assert (start, end) == (0, whole)
    lanes = browser.find_element(By.ID, "lanes")
    browser.execute_script("arguments[0].scrollIntoView()", lanes)
    changes_view(browser, lambda: lanes.send_keys("+"))
    changes_view(browser, ActionChains(browser).drag_and_drop_by_offset(lanes, -200, 0).perform)
    steps = browser.find_element(By.ID, "steps")
    changes_view(browser, ActionChains(browser).move_to_element_with_offset(steps, 5 - 600, 0).click().perform)


def test_a_row_leads_to_its_place(browser: Any) -> None:
    for section in ("gaps", "compiles"):
        row = browser.find_element(By.CSS_SELECTOR, f"#{section} tr.go:last-child")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", row)
        start, end = changes_view(browser, row.click)
        place = float(row.get_attribute("data-start"))
        assert start <= place <= end


def test_a_piece_tells_what_it_is(browser: Any) -> None:
    lanes = browser.find_element(By.ID, "lanes")
    browser.execute_script("arguments[0].scrollIntoView()", lanes)
    changes_view(browser, browser.find_element(By.ID, "slowest").click)
    # The second row is the host's; its slowest step is mostly lowering and compiling.
    height = lanes.size["height"]
    ActionChains(browser).move_to_element_with_offset(lanes, 0, 20 + 34 + 4 + 17 - height // 2).click().perform()
    detail = until(lambda: "from" in (text := browser.find_element(By.ID, "detail").text) and text)
    assert detail.startswith(("lower", "compile")) and "in page" in detail


def test_filtering(browser: Any) -> None:
    changes_picture(browser, lambda: browser.find_element(By.ID, "filter").send_keys("compiling"))
    chip = browser.find_element(By.CSS_SELECTOR, "#chips button[data-stage=compile]")
    changes_picture(browser, chip.click)
    assert chip.get_attribute("aria-pressed") == "false"


def test_dark_and_narrow(browser: Any) -> None:
    def background() -> str:
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = background()
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    changes_picture(browser, lambda: browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features}))
    assert background() != light
    size = {"width": 400, "height": 900, "deviceScaleFactor": 2, "mobile": True}
    changes_picture(browser, lambda: browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
