"""A real controller with a stage of jobs, and a real browser that shows its page."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from services.controller.store.store import Store
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import in_store
from tests.services.controller.page.stage import Stage, set_stage

FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb"]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "the page's tests need a browser: install Debian's chromium, or set FLOWFLEET_CHROMIUM to the path of one"
KEYS = {"look": "key-of-one-who-looks", "steer": "key-of-one-who-steers"}
SIZES: dict[str, dict[str, Any]] = {
    "desk": {"viewport": {"width": 1360, "height": 860}},
    "dark": {"viewport": {"width": 1360, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}, "is_mobile": True},
}


@dataclass(frozen=True)
class Site:
    url: str
    redis_url: str
    stage: Stage


T = TypeVar("T")


def in_stage(redis_url: str, act: Callable[[Store], Awaitable[T]]) -> T:
    """`in_store` in a thread of its own: the browser's loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(in_store, redis_url, act).result()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with its module: while it lives, no other event loop can run in this thread."""
    path = os.environ.get("FLOWFLEET_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def site(redis_of_module: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Who may look has a key, and who may steer."""
    directory = tmp_path_factory.mktemp("site")
    keys = directory / "keys.toml"
    lines = (
        f'[{may}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nmay = "{may}"\n' for may, key in KEYS.items()
    )
    keys.write_text("".join(lines))
    stage = in_stage(redis_of_module, lambda store: set_stage(store, directory))
    more = ("--reward", "jpeg_compressibility=a:2", "--keys-file", str(keys))
    controller = IdleController(redis_of_module, directory, *more)
    controller.start()
    controller.wait()
    yield Site(controller.url, redis_of_module, stage)
    controller.kill()


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    """Opens a place of the page, logged in. A test fails where the page's scripts do, or the policy stops something."""
    contexts: list[Any] = []
    faults: list[str] = []

    def open_page(place: str = "", may: str = "steer", size: str = "desk") -> Page:
        context = browser.new_context(base_url=site.url, **SIZES[size])
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if _is_fault(said) else None)
        answer = context.request.post("/v1/session", data={"key": KEYS[may]}, headers={"Origin": site.url})
        assert answer.ok, answer.text()
        page.goto(f"/#/{place}")
        page.locator("h1").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def _is_fault(said: Any) -> bool:
    """A picture that is gone is a 404 that the page shows, a session that is over a 401."""
    return said.type == "error" and not re.search(r"status of 40[149]", said.text)
