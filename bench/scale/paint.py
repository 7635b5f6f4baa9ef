"""How soon the page paints a long list of jobs, a large gallery, and the cells in sight after a jump in the gallery.

    python -m bench.scale.paint [--jobs 500] [--prompts 250] [--versions 40] [--tries 5] [--json FILE]

Starts a Redis and a controller as processes. All jobs have ended, so the controller drives none. One of them has a
held-out sample per prompt and version. A headless Chromium opens the page; each figure is the median of the tries.
All tries share one browser context, so after the first the page's files and pictures may come from its cache.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from bench.scale.pages import JOB, SETTLE_S, controller
from flowfleet.data.blobs import open_blobs
from flowfleet.job.spec import parse_job
from flowfleet.process.service import usable_cpus
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from flowfleet.redis.server import RedisServer
from services.controller.retention.keep import Keep
from services.controller.store.jobs import JobStore
from services.controller.store.records import SampleRecord

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
NUM_CURVES, NUM_POINTS = 60, 30
KEPT_S = 3600

FIRST_SEEN = """
window.firstSeen = new Promise((resolve, reject) => {
  const look = () => {
    const shown = document.querySelector(".virtual .job-row, .cell img");
    if (shown && (shown.tagName !== "IMG" || (shown.complete && shown.naturalWidth)))
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
    else if (performance.now() < 30000) requestAnimationFrame(look);
    else reject(new Error("the page painted no row and no picture in 30 s"));
  };
  requestAnimationFrame(look);
});
"""
"""Milliseconds from the navigation until the first row, or the first picture, has been painted."""

JUMP = """async ([down, right]) => {
  const box = document.querySelector(".gallery");
  const began = performance.now();
  box.scrollTo(right * box.scrollWidth, down * box.scrollHeight);
  const { top, bottom, left, right: end } = box.getBoundingClientRect();
  const isSeen = (cell) => {
    const place = cell.getBoundingClientRect();
    return place.bottom > top && place.top < bottom && place.right > left && place.left < end;
  };
  for (;;) {
    await new Promise(requestAnimationFrame);
    const seen = [...box.querySelectorAll(".cell")].filter(isSeen);
    const painted = seen.filter((cell) => cell.querySelector("img")?.naturalWidth);
    if (seen.length > 20 && painted.length === seen.length) break;
    if (performance.now() - began > 30000)
      throw new Error(`${painted.length} of ${seen.length} cells in sight show a picture 30 s after the jump`);
  }
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}"""
"""Milliseconds from a jump to these shares of the gallery until each cell in sight shows its picture."""


async def fill(store: JobStore, num_jobs: int, num_prompts: int, num_versions: int) -> str:
    """Adds ended jobs; the newest have curves. Returns the id of the oldest, which has the samples."""
    ids = []
    for number in range(num_jobs):
        record, _ = await store.create(parse_job({"name": f"job-{number:03d}", **JOB}))
        await store.set_status(record.id, "cancelled")
        ids.append(record.id)
    for job in ids[-NUM_CURVES:]:
        for step in range(NUM_POINTS):
            await store.add_point(job, step, 0.1 * step)
    await _add_samples(store, ids[0], num_prompts, num_versions)
    return ids[0]


async def _add_samples(store: JobStore, job: str, num_prompts: int, num_versions: int) -> None:
    """Each prompt has one picture, which all its versions share. Each sample's picture has its own URL."""
    blobs = open_blobs(store._redis)
    names = [keys.blob(job, "media", group) for group in range(num_prompts)]
    refs = [await blobs.put(name, picture(), ttl_s=KEPT_S) for name in names]
    for version in range(num_versions):
        samples = (
            SampleRecord(
                step=version,
                group=group,
                index=0,
                purpose="validate",
                prompt=f'A sign that says "{group}"',
                reward=group / num_prompts,
                media_uri=ref.uri,
                media_size_bytes=ref.size_bytes,
                media_sha256=ref.sha256,
            )
            for group, ref in enumerate(refs)
        )
        await store.put_samples(job, samples)
        await store.metrics_put(job, version, {"val/reward": 0.5})


def picture() -> bytes:
    """A PNG of 64 by 64 pixels of noise."""
    data = io.BytesIO()
    Image.effect_noise((64, 64), 64).save(data, "PNG")
    return data.getvalue()


async def fill_redis(redis_url: str, num_jobs: int, num_prompts: int, num_versions: int) -> str:
    redis = connect(redis_url)
    job = await fill(JobStore(redis), num_jobs, num_prompts, num_versions)
    await redis.aclose()
    return job


def first_seen_s(page: Page, url: str, tries: int) -> float:
    """Seconds from the navigation to the first row or picture."""
    found = []
    for _ in range(tries):
        page.goto("about:blank")  # else a new fragment would not load the page again
        page.goto(url)
        found.append(float(page.evaluate("window.firstSeen")) / 1000)
    return round(statistics.median(found), 3)


def jump_ms(page: Page, tries: int) -> int:
    """Milliseconds until the cells in sight show their pictures, each time in another part of the gallery."""
    places = [((0.2 + 0.618 * number) % 0.9, 0.382 * number % 0.8) for number in range(tries)]
    return round(statistics.median(float(page.evaluate(JUMP, place)) for place in places))


def measure(browser: str, url: str, job: str, tries: int) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1360, "height": 860})
        page.add_init_script(FIRST_SEEN)
        figures = {
            "first_row_s": first_seen_s(page, f"{url}/#/jobs", tries),
            "first_picture_s": first_seen_s(page, f"{url}/#/jobs/{job}/gallery", tries),
            "jump_to_pictures_ms": jump_ms(page, tries),
        }
        chromium.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale.paint", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=250)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.jobs > Keep().jobs:
        parser.error(f"the controller keeps only {Keep().jobs} ended jobs: set --jobs to {Keep().jobs} or fewer")
    if min(options.prompts, options.versions) < 20:
        parser.error("the gallery fits into the window: set --prompts and --versions to 20 or more")
    if find_spec("playwright") is None:
        parser.error("playwright is missing: run `make setup`")
    browser = os.environ.get("FLOWFLEET_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if browser is None:
        parser.error("no browser found: install Debian's chromium, or set FLOWFLEET_CHROMIUM to the path of one")
    result = {"jobs": options.jobs, "samples": options.prompts * options.versions}
    result |= {"cpus": usable_cpus(), "load_average": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as name:
        server = RedisServer(Path(name))
        try:
            redis_url = server.start()
            job = asyncio.run(fill_redis(redis_url, options.jobs, options.prompts, options.versions))
            with controller(redis_url, Path(name)) as (_, url):
                time.sleep(SETTLE_S)
                result |= measure(browser, url, job, options.tries)
        finally:
            server.stop()
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=4) + "\n")


if __name__ == "__main__":
    main()
