"""The page of real jobs: what one trained is drawn, each sample leads to the checkpoint that has it, and a shadow is
added and promoted while its job runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.conftest import Fleet
from tests.services.controller.page.conftest import browser

__all__ = ["browser"]

pytestmark = pytest.mark.long


def test_a_real_job_is_drawn(fleet: Fleet, small_job: Callable[..., dict[str, Any]], browser: Browser) -> None:
    job = fleet.run(small_job())
    page = browser.new_page(base_url=fleet.stack.url)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(fleet.stack.page)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="small", exact=True))
    expect(row).to_contain_text("succeeded")
    expect(row.locator("svg.spark path")).to_have_count(1)
    row.get_by_role("link", name="small").click()
    for title in ("Reward", "ocr", "KL", "Clip fraction", "Ratio", "Throughput", "Edge density"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    page.get_by_role("link", name="Gallery").click()
    heads = page.get_by_role("columnheader")
    expect(heads).to_have_text(["Prompt", "version 4", "version 2", "version 0"])
    expect(page.get_by_role("gridcell", name=re.compile(r"version 4, reward [0-9]")).first).to_be_visible()
    page.get_by_role("link", name="Samples", exact=True).click()
    page.locator(".sample a").first.click()
    trace = page.get_by_role("article")
    for fact in ("Advantage", "Ratio at the update", "First version that has it"):
        expect(trace.get_by_text(fact)).to_be_visible()
    expect(trace).to_contain_text(re.compile("Checkpoint that has it *step 4"))
    assert faults == []
    assert fleet.client.job(job.id).ended


def test_a_shadow_is_added_compared_and_promoted(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], browser: Browser
) -> None:
    job = fleet.client.submit(small_job(**{"name": "shadowed", "schedule.steps": 500}))
    page = browser.new_page(base_url=fleet.stack.url)
    page.set_default_timeout(60_000)
    page.goto(fleet.stack.page)
    expect(page.get_by_role("heading", level=1)).not_to_have_text("Flowfleet")  # logged in
    page.goto(f"/#/rewards/{job.id}")
    page.get_by_role("button", name="Add a shadow").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Training does not see its scores")
    dialog.get_by_label("Name").fill("twin")
    dialog.get_by_label("Next to the reward").select_option("ocr")
    dialog.get_by_label("Reward service").fill("ocr")
    dialog.get_by_role("button", name="Add a shadow").click()
    shadows = page.get_by_role("region", name="Shadows")
    row = shadows.get_by_role("row", name="twin")
    expect(row.get_by_role("cell").nth(1)).to_have_text(re.compile(r"^(1|0\.\d+)$"), timeout=120_000)
    row.get_by_role("button", name="Promote").click()
    expect(dialog).to_contain_text("ocr is scored by twin's service")
    dialog.get_by_role("button", name="Promote").click()
    history = page.get_by_role("listitem").filter(has_text="Revision")
    expect(history.first).to_contain_text("promot", timeout=120_000)
    page.goto(f"/#/jobs/{job.id}")
    page.get_by_role("button", name="Cancel job").click()
    dialog.get_by_role("button", name="Cancel job").click()
    assert fleet.client.wait(job.id, 120).status == "cancelled"
    revisions = fleet.client.rewards(job.id).history
    assert [revision.number for revision in revisions] == [0, 1, 2]
