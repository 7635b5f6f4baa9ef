"""Voting in a browser: keys, buttons and pictures choose, and the votes are those of the key's holder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from flowfleet.data.blobs import open_blobs
from flowfleet.proto import common_pb2
from flowfleet.redis import keys
from services.controller.store.sample_refs import SampleRefs
from services.controller.store.store import Store
from tests.services.controller.page.conftest import KEYS, Site, Visit, in_stage
from tests.services.controller.page.stage import create, settings, sign
from tests.waiting import wait_until

SIZE, GROUPS = 3, 4
PROMPT = 'A <b>red</b> sign that says "K7QX"'


async def paint(store: Store, job_id: str) -> None:
    """Groups of samples without scores, as a job that waits for votes has them."""
    blobs = open_blobs(store.link.redis, "redis")
    refs, samples = SampleRefs(store.link.redis, blobs, job_id), []
    for group in range(GROUPS):
        for index in range(SIZE):
            sample = common_pb2.Sample(media_type="image/png")
            sample.id.job_id, sample.id.step, sample.id.group, sample.id.index = job_id, 0, group, index
            name = keys.blob(job_id, "media", 0, group, index)
            sample.media.CopyFrom(await blobs.put(name, sign(group, index / SIZE, 7 * group + index)))
            samples.append(sample)
    async with store.link.redis.pipeline(transaction=True) as pipe:
        await refs.put(samples, pipe)
        await pipe.execute()


@pytest.fixture
def waiting(site: Site, tmp_path: Any) -> str:
    """A job whose groups wait for three votes each."""
    spec = settings(tmp_path, "signs-by-votes", rewards={"human": {}})

    async def act(store: Store) -> str:
        job_id = await create(store, spec)
        await paint(store, job_id)
        return job_id

    job_id = in_stage(site.redis_url, act)
    body = {"prompt": PROMPT, "samples": [{"index": index} for index in range(SIZE)], "wanted": 3}
    for group in range(GROUPS):
        url = f"{site.url}/v1/jobs/{job_id}/votes/groups/0/{group}"
        httpx.put(url, json=body, headers={"X-API-Key": KEYS["steer"]}).raise_for_status()
    return job_id


def votes_of(site: Site, job_id: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{site.url}/v1/jobs/{job_id}/votes", headers={"X-API-Key": KEYS["look"]})
    return [vote for group in answer.json()["items"] for vote in group["votes"]]


def shown(page: Page) -> list[str]:
    """Pictures on the left and on the right."""
    return [str(one.get_attribute("src")) for one in page.locator(".vote-pair img").all()]


def changed(page: Page, before: list[str]) -> bool:
    return shown(page) != before


Act = Callable[[Page], object]
ACTS: list[tuple[str, Act]] = [
    ("left", lambda page: page.keyboard.press("ArrowLeft")),
    ("right", lambda page: page.keyboard.press("d")),
    ("tie", lambda page: page.keyboard.press("ArrowUp")),
    ("neither", lambda page: page.keyboard.press("n")),
    ("tie", lambda page: page.get_by_role("button", name="Tie").click()),
    ("right", lambda page: page.locator(".vote-media").last.click()),
]


def test_keys_buttons_and_pictures_vote_until_no_pair_waits(visit: Visit, site: Site, waiting: str) -> None:
    page = visit(f"vote/{waiting}")
    expect(page.get_by_text(PROMPT)).to_be_visible()  # as text
    expected = []
    for choice, act in ACTS:
        expect(page.locator(".vote-pair img")).to_have_count(2)
        pair = shown(page)
        expected.append((choice, *[int(path.split("/")[-2]) for path in pair]))
        act(page)
        wait_until(partial(changed, page, pair))
    wait_until(lambda: len(votes_of(site, waiting)) == len(ACTS))
    votes = sorted(votes_of(site, waiting), key=lambda vote: vote["time"])
    assert {vote["voter"] for vote in votes} == {"steer"}
    found = sorted((vote["choice"], vote["left"], vote["right"]) for vote in votes)
    assert found == sorted(expected)
    while page.locator(".vote-pair").count():
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(50)
    expect(page.get_by_text("No pair waits")).to_be_visible()
    page.get_by_text("Agreement of voters").click()
    expect(page.get_by_role("rowheader", name="steer")).to_be_visible()
    expect(page.get_by_text("only guard")).to_be_visible()


@pytest.mark.parametrize("size", ["desk", "dark", "phone"])
def test_the_view_has_no_findings_and_fits(visit: Visit, waiting: str, size: str, tmp_path: Any) -> None:
    page = visit(f"vote/{waiting}", size=size)
    expect(page.locator(".vote-pair img").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for button in page.locator(".vote-keys button").all():
        box = button.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        assert box["y"] + box["height"] <= page.viewport_size["height"]  # type: ignore[index]
    found = Axe().run(page).response["violations"]
    assert [one["id"] for one in found] == []
    page.screenshot(path=tmp_path / f"vote-{size}.png", full_page=True)


def test_the_next_pair_is_loaded_before_it_is_shown(visit: Visit, waiting: str) -> None:
    page = visit(f"vote/{waiting}")
    expect(page.locator(".vote-pair img")).to_have_count(2)
    hidden = page.locator(".hidden img")
    expect(hidden).to_have_count(2)
    loaded = "all => all.every(one => one.complete && one.naturalWidth)"
    wait_until(lambda: hidden.evaluate_all(loaded))
    following = [one.get_attribute("src") for one in hidden.all()]
    page.keyboard.press("ArrowLeft")
    wait_until(lambda: shown(page) == following)


def test_who_may_only_look_gets_no_pair(visit: Visit, waiting: str) -> None:
    page = visit(f"vote/{waiting}", may="look")
    expect(page.get_by_text("Your key may look")).to_be_visible()
    assert page.locator(".vote-pair").count() == 0
