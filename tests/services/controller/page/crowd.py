"""A controller's Redis with many ended jobs and samples, and what the page is asked about them."""

from __future__ import annotations

import io

from PIL import Image

from flowfleet.data.blobs import open_blobs
from flowfleet.job.spec import parse_job
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store

JOB = {"model": {"path": "m"}, "data": {"train": "p"}, "rewards": {"ocr": {}}}
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


async def fill(store: Store, num_jobs: int, num_prompts: int, num_versions: int) -> str:
    """Adds ended jobs; the newest have curves. Returns the id of the oldest, which has the samples."""
    ids = []
    for number in range(num_jobs):
        record, _ = await store.jobs.create(parse_job({"name": f"job-{number:03d}", **JOB}))
        await store.jobs.set_status(record.id, "cancelled")
        ids.append(record.id)
    for job in ids[-NUM_CURVES:]:
        for step in range(NUM_POINTS):
            await store.lists.add_point(job, step, 0.1 * step)
    await _add_samples(store, ids[0], num_prompts, num_versions)
    return ids[0]


async def _add_samples(store: Store, job: str, num_prompts: int, num_versions: int) -> None:
    """Each prompt has one picture, which all its versions share. Each sample's picture has its own URL."""
    blobs = open_blobs(store.link.redis)
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
        await store.samples.put(job, *samples)
        await store.history.put_metrics(job, version, {"val/reward": 0.5})


def picture() -> bytes:
    """A PNG of 64 by 64 pixels of noise."""
    data = io.BytesIO()
    Image.effect_noise((64, 64), 64).save(data, "PNG")
    return data.getvalue()
