"""A sweep in the page: one row of the list, which opens into curves by settings."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from flowfleet.api.jobs import SweepPart
from flowfleet.api.overview import Curve
from flowfleet.job.spec import parse_job
from flowfleet.redis import keys
from services.controller.store.store import Store
from tests.services.controller.page.conftest import Site, Visit, in_stage
from tests.services.controller.page.crowd import JOB
from tests.services.controller.page.test_page import findings, row_of

RATES, SEEDS, STEPS = (1e-5, 1e-4, 1e-3), 4, 40


async def add_sweep(store: Store, name: str, rates: tuple[float, ...], seeds: int) -> list[str]:
    """Jobs of which the second rate is best; the last job is queued."""
    jobs = []
    for number, rate in enumerate(rates):
        for seed in range(seeds):
            part = SweepPart(name=name, settings={"trainer.optimizer.lr": rate, "seed": seed}, at_once=4)
            record, _ = await store.jobs.create(parse_job({"name": "signs", **JOB}), sweep=part)
            jobs.append(record.id)
            slope = (0.01, 0.02, 0.005)[number % 3] + 0.0005 * seed
            curve = Curve(values=tuple(0.1 + slope * step + 0.02 * ((7 * step + seed) % 5) for step in range(STEPS)))
            best = 0.1 + slope * STEPS
            await store.link.redis.hset(keys.job(record.id), "curve", curve.model_dump_json())
            await store.jobs.set_status(record.id, "running")
            await store.jobs.update_progress(
                record.id,
                step=STEPS,
                steps=2 * STEPS,
                reward=curve.values[-1],
                held_out_reward=best - 0.1,
                held_out_best=best,
            )
    return jobs


@pytest.fixture(scope="module")
def sweep(site: Site) -> list[str]:
    return in_stage(site.redis_url, lambda store: add_sweep(store, "lr", RATES, SEEDS))


def test_a_sweep_is_one_row_that_opens_into_curves_by_settings(visit: Visit, site: Site, sweep: list[str]) -> None:
    page = visit("jobs")
    row = row_of(page, "lr")
    expect(row).to_contain_text("sweep of 12 jobs")
    expect(row).to_contain_text("12 running")
    expect(row).to_contain_text("best: trainer.optimizer.lr=1e-4")
    expect(row).to_contain_text("480 of 960")
    expect(page.get_by_role("row")).to_have_count(5)  # with the heads, and three jobs of their own
    row.get_by_role("link", name="lr", exact=True).click()
    table = page.get_by_role("table").filter(has_text="trainer.optimizer.lr")
    expect(table.locator("tbody tr td:first-child")).to_have_text(["1e-4", "1e-5", "0.001"])
    mean = sum(0.1 + (0.02 + 0.0005 * seed) * STEPS for seed in range(SEEDS)) / SEEDS
    expect(table.locator("tbody tr").first.locator("td.num").first).to_have_text(f"{mean:.3f}".rstrip("0"))
    expect(page.locator(".plot canvas")).to_be_visible()
    expect(page.locator(".legend b")).to_have_count(3)
    assert findings(page) == []
    table.get_by_role("link", name="seed 3").first.click()
    expect(page).to_have_url(f"{site.url}/#/jobs/{sweep[SEEDS + 3]}")


def test_jobs_of_a_sweep_change_their_row_as_they_go_on(visit: Visit, site: Site, sweep: list[str]) -> None:
    page = visit("jobs")
    expect(row_of(page, "lr")).to_contain_text("12 running")
    expect(page.locator(".live")).to_contain_text("Live")
    in_stage(site.redis_url, lambda store: store.jobs.set_status(sweep[0], "failed", "on purpose"))
    expect(row_of(page, "lr")).to_contain_text("1 failed")
    page.get_by_role("button", name="ended").click()
    expect(row_of(page, "lr")).to_contain_text("sweep of 1 job")
