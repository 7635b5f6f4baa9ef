"""The page in a browser: who may look sees everything, who may steer has buttons, and text stays text."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from flowfleet.api.rewards import RewardRevision
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.services.controller.page.conftest import KEYS, Site, Visit, in_stage
from tests.services.controller.page.stage import HACKED_FROM, create, run_job, seed_of, settings

HOSTILE = """</title><script>document.title = "run"</script><img src=x onerror="document.title = 'run'"> & ä 猫"""


def findings(page: Page) -> list[str]:
    """What axe finds, a line each."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}" for one in found]


def row_of(page: Page, job: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=job, exact=True))


def test_a_key_opens_the_page_and_logging_out_closes_it(browser: Browser, site: Site) -> None:
    context = browser.new_context(base_url=site.url)
    page = context.new_page()
    page.goto("/")
    page.get_by_label("API key").fill("a-wrong-key")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).not_to_be_empty()
    page.get_by_label("API key").fill(KEYS["look"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    (cookie,) = context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert KEYS["look"] not in page.url + page.evaluate("document.cookie + JSON.stringify(localStorage)")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    context.close()


def test_a_printed_link_logs_in_and_leaves_the_address(browser: Browser, site: Site) -> None:
    page = browser.new_context(base_url=site.url).new_page()
    page.goto("/#key=a-wrong-key")
    expect(page.get_by_label("API key")).to_be_visible()
    page.goto(f"/#key={KEYS['look']}")  # in an open page, which sees another fragment alone
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    assert page.evaluate("location.hash") == "#/"
    page.go_back()
    assert KEYS["look"] not in page.url
    page.context.close()


def test_jobs_say_what_they_do_and_where_to_look(visit: Visit, site: Site) -> None:
    page = visit("jobs")
    row = row_of(page, "signs-small-files")
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("11 of 12")
    expect(row.get_by_role("link", name=re.compile("ocr.* falls since 4|ocr.* falls since 5"))).to_be_visible()
    guarded = row_of(page, "signs-guarded")
    expect(guarded).to_contain_text("running")
    expect(guarded.locator(".badge.warn")).to_have_count(0)
    expect(row_of(page, "signs-longer")).to_contain_text("queued")
    page.get_by_label("Filter jobs").fill("guarded")
    expect(page.get_by_role("row")).to_have_count(2)


def test_what_changes_is_seen_without_a_reload(visit: Visit, site: Site) -> None:
    page = visit("jobs")
    row = row_of(page, "signs-longer")
    expect(page.locator(".live")).to_contain_text("Live")
    in_stage(
        site.redis_url, lambda store: store.jobs.update_progress(site.stage.queued, phase="validate", reward=0.4321)
    )
    expect(row).to_contain_text("0.4321")


SEEN = """isHidden => {
  Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_hidden_tab_leaves_its_connection_to_others_and_catches_up(visit: Visit, site: Site) -> None:
    """Each stream keeps one of the six connections that a browser has to a controller."""
    page = visit("jobs")
    state = page.locator(".live")
    expect(state).to_have_attribute("data-state", "open")
    page.clock.install()
    page.evaluate(SEEN, True)
    page.clock.run_for(6000)
    expect(state).to_have_attribute("data-state", "closed")
    in_stage(
        site.redis_url, lambda store: store.jobs.update_progress(site.stage.queued, phase="validate", reward=0.2345)
    )
    page.clock.resume()
    page.evaluate(SEEN, False)
    expect(state).to_have_attribute("data-state", "open")
    expect(row_of(page, "signs-longer")).to_contain_text("0.2345")


def test_a_session_that_ended_elsewhere_asks_for_the_key(visit: Visit, site: Site) -> None:
    page = visit("jobs")
    expect(page.locator(".live")).to_have_attribute("data-state", "open")
    page.clock.install()
    page.context.clear_cookies()
    page.evaluate(SEEN, True)
    page.clock.run_for(6000)
    page.evaluate(SEEN, False)
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_point_of_a_curve_leads_to_its_samples(visit: Visit, site: Site) -> None:
    page = visit(f"jobs/{site.stage.hacked}")
    plot = page.get_by_role("application", name=re.compile("^ocr:"))
    over = plot.locator(".u-over").bounding_box()
    assert over is not None
    page.mouse.click(over["x"] + over["width"] * 0.6, over["y"] + 40)
    expect(page).to_have_url(re.compile(r"/samples\?purpose=train&step=6&by=ocr&order=best"))
    expect(page.locator(".sample")).to_have_count(12)
    expect(page.get_by_role("heading", name="Step 6")).to_be_visible()


def test_the_keyboard_alone_reaches_a_sample_of_a_curve(visit: Visit, site: Site) -> None:
    page = visit(f"jobs/{site.stage.hacked}")
    page.get_by_role("application", name=re.compile("^KL:")).focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile("step=2"))
    page.locator(".sample a").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Policy version")).to_be_visible()
    group, index = map(int, page.url.partition("?")[0].split("/")[-2:])
    expect(page.get_by_text(str(seed_of(group, index)), exact=True)).to_be_visible()
    expect(page.locator(".cards .sample")).to_have_count(4)


def test_the_gallery_moves_by_keys_and_compares(visit: Visit, site: Site) -> None:
    page = visit(f"jobs/{site.stage.hacked}/gallery")
    grid = page.get_by_role("grid")
    expect(grid.get_by_role("columnheader")).to_have_text(["Prompt", "version 8", "version 4", "version 0"])
    first = grid.get_by_role("gridcell", name=re.compile("version 8, reward -")).first
    expect(first).to_be_visible()
    first.focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(grid.locator(":focus")).to_have_attribute("aria-label", re.compile("version 4"))
    assert page.evaluate("document.activeElement.querySelector('img').naturalWidth") == 64
    page.keyboard.press("c")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("A green sign")
    share = dialog.get_by_role("slider")
    share.focus()
    page.keyboard.press("End")
    expect(share).to_have_value("100")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_buttons_ask_once_and_say_what_follows(visit: Visit, site: Site) -> None:
    page = visit(f"jobs/{site.stage.guarded}")
    page.get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("nothing else starts")
    dialog.get_by_role("button", name="Keep as it is").click()
    assert desired(site, site.stage.guarded) == "running"
    page.get_by_role("button", name="Pause").click()
    dialog.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert desired(site, site.stage.guarded) == "paused"
    page.get_by_role("button", name="Resume").click()
    dialog.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_role("button", name="Extend").click()
    dialog.get_by_label("Training steps in all").fill("3")
    assert not dialog.get_by_label("Training steps in all").evaluate("input => input.validity.valid")


def test_changed_rewards_break_the_curve_of_the_total(visit: Visit, site: Site, tmp_path: Path) -> None:
    """A shadow changes no reward: the line stays whole."""

    async def change(store: Store) -> str:
        job = await run_job(store, settings(tmp_path, "reweighted"), is_hacked=False)
        before = (await store.jobs.get(job)).rewards.active.rewards
        heavier = {**before, "ocr": {**before["ocr"], "weight": 2.0}}
        shadow = {"trial": {"for": "ocr", "service": "ocr"}}
        for number, rewards, shadows, step in ((1, before, shadow, 3), (2, heavier, shadow, 7)):
            revision = RewardRevision(number=number, changes=["…"], rewards=rewards, shadows=shadows, from_step=step)
            await store.rewards.change(job, revision)
            async with store.link.redis.pipeline(transaction=True) as pipe:
                await store.rewards.apply(job, revision, pipe, is_break=number == 2)
                await pipe.execute()
        return job

    page = visit(f"jobs/{in_stage(site.redis_url, change)}")
    charts = page.locator("figure.chart")
    expect(charts.filter(has_text="rewards changed at step 7")).to_have_count(1)
    expect(charts.filter(has_text="rewards changed at")).to_have_count(1)
    expect(charts.first).to_contain_text("Reward")
    curve = row_of(visit(""), "reweighted").locator("svg.spark")
    expect(curve).to_have_attribute("aria-label", "Training reward; rewards changed at step 7")
    expect(curve.locator("line")).to_have_count(1)
    assert len(re.findall("M", curve.locator("path").get_attribute("d") or "")) == 2, "two lines, apart there"


def test_who_may_only_look_has_no_buttons(visit: Visit, site: Site) -> None:
    page = visit(f"jobs/{site.stage.guarded}", may="look")
    expect(page.get_by_role("application").first).to_be_visible()
    for name in ("Pause", "Finish", "Extend", "Cancel job"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)


def test_hostile_text_stays_text(visit: Visit, site: Site, tmp_path: Path) -> None:
    async def fill(store: Store) -> str:
        job = await create(store, settings(tmp_path, "hostile"))
        await store.jobs.set_status(job, "failed", HOSTILE)
        scores: dict[str, float | None] = {"ocr": 0.5, HOSTILE: 0.5}
        await store.samples.put(
            job, SampleRecord(step=0, group=0, index=0, prompt=HOSTILE, scores=scores, media_type="text/odd")
        )
        return job

    job = in_stage(site.redis_url, fill)
    for place in (f"jobs/{job}/samples", f"jobs/{job}/samples/0/0/0", "jobs"):
        page = visit(place)
        expect(page.get_by_text("</title>").first).to_be_visible()
        assert "run" not in page.title().split()
        assert page.locator("img[onerror]").count() == 0


PLACES = ["jobs", "jobs/{hacked}", "jobs/{hacked}/gallery", "jobs/{hacked}/samples", "jobs/{hacked}/samples/5/1/2",
          "jobs/{hacked}/rewards", "jobs/{hacked}/settings", "rewards", "fleet"]  # fmt: skip


@pytest.mark.parametrize(
    "size", ["desk", pytest.param("dark", marks=pytest.mark.long), pytest.param("phone", marks=pytest.mark.long)]
)
def test_axe_finds_nothing(visit: Visit, site: Site, size: str) -> None:
    page = visit("jobs", size=size)
    found = {}
    for place in PLACES:
        page.goto(f"{site.url}/#/{place.format(hacked=site.stage.hacked)}")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{place} is wider than the screen"
        if problems := findings(page):
            found[place] = problems
    assert found == {}


def test_a_hacked_reward_is_found_and_stopped_in_four_clicks(visit: Visit, site: Site, tmp_path: Path) -> None:
    """Which of several jobs, from which step on, by which samples: the page alone says so."""
    job = in_stage(site.redis_url, lambda store: run_job(store, settings(tmp_path, "one-of-many"), is_hacked=True))
    page = visit("jobs")
    row_of(page, "one-of-many").get_by_role("link", name=f"ocr falls since {HACKED_FROM}").click()
    notice = page.get_by_role("region", name="Signs of a hacked reward")
    expect(notice).to_contain_text(re.compile(rf"ocr falls from 0\.8\d* to 0\.0\d*, since step {HACKED_FROM}"))
    notice.get_by_role("link", name="Samples from there").click()
    expect(page.get_by_role("heading", name=f"Step {HACKED_FROM}")).to_be_visible()
    expect(page.locator(".sample img").first).to_be_visible()
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)
    assert desired(site, job) == "cancelled"


def desired(site: Site, job: str) -> str:
    headers = {"X-API-Key": KEYS["look"]}
    return str(httpx.get(f"{site.url}/v1/jobs/{job}", headers=headers).json()["desired"])
