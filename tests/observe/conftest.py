"""A real browser for the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

INSTALL = "apt-get install chromium chromium-driver (or set RETROGRAD_CHROMIUM and RETROGRAD_CHROMEDRIVER)"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,900",
)


class Browser:
    """Chromium with one page; the console must stay silent."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Load a page anew, even if only what follows its # differs."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def wait(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        """Until something is true; its value."""
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def script(self, text: str, *arguments: Any) -> Any:
        """The value of some JavaScript."""
        return self.driver.execute_script(f"return {text}", *arguments)

    def one(self, selector: str) -> WebElement:
        """The first element that is shown, once there is one."""
        found: WebElement = self.wait(
            lambda: self.script(
                "[...document.querySelectorAll(arguments[0])].find((e) => e.checkVisibility())", selector
            )
        )
        return found

    def texts(self, selector: str) -> list[str]:
        """What is in all elements, read at once: the page may draw them anew."""
        found: list[str] = self.script(
            "[...document.querySelectorAll(arguments[0])]"
            ".filter((e) => e.checkVisibility()).map((e) => e.textContent)",
            selector,
        )
        return found

    def text(self, selector: str) -> str:
        """The text of the first one, "" if there is none."""
        return (self.texts(selector) or [""])[0]

    def click(self, selector: str) -> None:
        """Click what is there now: the page may draw it anew at any time."""
        self.one(selector)
        self.script("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        """Keys to the page as a whole."""
        for key in keys:
            self.driver.find_element("css selector", "body").send_keys(key)

    def errors(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    binary = os.environ.get("RETROGRAD_CHROMIUM") or shutil.which("chromium")
    driver_path = os.environ.get("RETROGRAD_CHROMEDRIVER") or shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.fail(f"the page is tested in a real browser: {INSTALL}")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    """The browser; a test fails if the page wrote an error to the console."""
    made = Browser(chromium)
    made.errors()
    yield made
    assert made.errors() == []
    chromium.get("about:blank")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 updates with 6 groups of 8, resumed after update 9; not to be changed."""
    from .examples import record_sums

    directory = tmp_path_factory.mktemp("sums")
    record_sums(directory, 11, groups=6)
    record_sums(directory, 3, groups=6, start=10)
    return directory
