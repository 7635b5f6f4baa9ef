"""The page draws only what is in sight of 500 jobs and 10,000 samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.flowfleet.conftest import IdleController
from tests.services.controller.page.conftest import in_stage
from tests.services.controller.page.crowd import FIRST_SEEN, JUMP, fill

pytestmark = pytest.mark.long

JOBS, PROMPTS, VERSIONS = 500, 250, 40
MOST_ROWS, MOST_CELLS = 40, 120
PLACES = [(0.2, 0.0), (0.7, 0.5), (0.4, 0.8), (0.9, 0.2), (0.55, 0.6)]


@pytest.fixture(scope="module")
def crowded(redis_of_module: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a controller with 500 jobs, and the id of the one with 10,000 held-out samples."""
    job = in_stage(redis_of_module, lambda store: fill(store, JOBS, PROMPTS, VERSIONS))
    controller = IdleController(redis_of_module, tmp_path_factory.mktemp("crowded"))
    controller.start()
    controller.wait()
    yield controller.url, job
    controller.kill()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    context.add_init_script(FIRST_SEEN)
    page = context.new_page()
    yield page
    context.close()


def test_only_jobs_in_sight_have_rows(crowded: tuple[str, str], page: Page) -> None:
    url, _ = crowded
    page.goto(f"{url}/#/jobs")
    page.evaluate("window.firstSeen")
    page.locator(f".jobs[aria-rowcount='{JOBS + 1}']").wait_for()  # the first request brings the newest alone
    assert 0 < page.locator(".virtual .job-row").count() < MOST_ROWS


def test_only_samples_in_sight_have_cells(crowded: tuple[str, str], page: Page) -> None:
    url, job = crowded
    page.goto(f"{url}/#/jobs/{job}/gallery")
    page.evaluate("window.firstSeen")
    page.locator(f".gallery[aria-rowcount='{PROMPTS + 1}'][aria-colcount='{VERSIONS + 1}']").wait_for()
    assert 0 < page.locator(".cell").count() < MOST_CELLS


def test_cells_in_sight_get_their_pictures_after_a_jump(crowded: tuple[str, str], page: Page) -> None:
    url, job = crowded
    page.goto(f"{url}/#/jobs/{job}/gallery")
    page.evaluate("window.firstSeen")
    rows = set()
    for place in PLACES:
        page.evaluate(JUMP, place)
        assert page.locator(".cell").count() < MOST_CELLS
        rows.add(page.locator(".gallery .line").first.get_attribute("aria-rowindex"))
    assert len(rows) == len(PLACES)
