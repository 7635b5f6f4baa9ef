"""The Python client of Flowfleet, asynchronous: all that the command line does, and nothing that it cannot.

    async with AsyncClient() as client:
        job = await client.submit(Path("recipes/tiny_ocr.toml"))
        async for event in client.events(job.id):
            print(event.type, event.data)
        print((await client.job(job.id)).results)

Every call raises `ApiError`, in the API's own words, when the call is rejected or no controller answers. If a
controller that answered before is unreachable, calls are retried for a few seconds. Every call may be repeated, submits
too, since each carries an Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from flowfleet.api.access import Upload
from flowfleet.api.answers import read
from flowfleet.api.attach import AttachCommand
from flowfleet.api.fleet import Fleet
from flowfleet.api.jobs import MAX_SWEEP, Checkpoint, Job, JobEvent, MetricsRow, Priority
from flowfleet.api.overview import JobRow
from flowfleet.api.problems import ApiError
from flowfleet.api.profiles import Profile
from flowfleet.api.rewards import Rewards
from flowfleet.api.samples import Sample
from flowfleet.client.connection import AWAY, CHECKS_S, POLL_S, RETRY_DELAYS_S, unreachable
from flowfleet.client.download import download
from flowfleet.client.frames import metrics_frame, picture, samples_frame, sweep_frame
from flowfleet.client.transport import Query
from flowfleet.client.uploading import Pieces, digest_of, files_to_upload, with_places
from flowfleet.client.voting import AsyncVoting
from flowfleet.filesystem import filesystem_id
from flowfleet.job.files import find_job_file, folders_of, prepare_job
from flowfleet.job.model_files import ModelManifest
from flowfleet.job.spec import JobSpec
from flowfleet.job.sweeps import JobFile, Values, asked_sweep
from flowfleet.prompts.uploads import name_of

if TYPE_CHECKING:
    from pandas import DataFrame
    from PIL.Image import Image


class AsyncClient(AsyncVoting):
    """Client of the REST API for asyncio. Its connection pool closes at the end of an `async with` block. Without a URL
    it uses FLOWFLEET_URL, else this machine's stack. For https URLs, `ca` (else FLOWFLEET_CA) is the PEM file of a
    private CA, trusted instead of the system's.
    """

    @property
    async def same_files(self) -> bool:
        """Asks the controller if it sees the files of this process: a loopback port may be a forwarded one."""
        return self.on_this_machine and (await self.version()).get("filesystem") == filesystem_id()

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        job: JobSpec | Mapping[str, Any] | Path | str,
        idempotency_key: str | None = None,
        *,
        file: Path | None = None,
    ) -> Job:
        """Queues a job: a spec, a mapping, or a job file. The same key with the same job gives the first one.

        A controller that sees other files than this process gets uploads of the data files that it cannot read and that
        lie here: in the current directory, or in the job file's (`file`: of a spec) or one above."""
        if isinstance(job, Path | str):
            file = find_job_file(Path(job))
            job = prepare_job(file, same_machine=await self.same_files)
        body = job.model_dump(mode="json") if isinstance(job, JobSpec) else dict(job)
        headers = {"idempotency-key": idempotency_key or str(uuid.uuid4())}
        return read(Job, await self._submit("/v1/jobs", body, body, file, headers=headers))

    async def sweep(
        self, job: JobFile, settings: Values, *, zipped: bool = False, name: str = "", at_once: int | None = None
    ) -> list[Job]:
        """Queues a job for each combination of the settings' values, once all of them are checked (docs/sweeps.md).
        `zipped`: the first values together, then the second ones. `at_once`: most jobs that run at once. A repeated
        call queues what is not queued yet. ValueError and ApiError name the settings of jobs that cannot run."""
        here = await self.same_files
        asked = await asyncio.to_thread(asked_sweep, job, settings, zipped=zipped, name=name, same_machine=here)
        file = None if isinstance(job, Mapping) else find_job_file(Path(job))
        body = {**asked, "at_once": at_once}
        return [read(Job, one) for one in await self._submit("/v1/sweeps", body, body["job"], file, timeout=CHECKS_S)]

    async def upload(self, path: Path | str) -> str:
        """Sends a prompt file to the controller. Returns how a job names it in `data.train`, `data.validation` or a
        source, as `upload:SHA256/NAME`. Media that its prompts name are not sent."""
        path = Path(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder: upload one file, such as .parquet")
        url = f"/v1/uploads/{await asyncio.to_thread(digest_of, path)}/{name_of(path)}"
        headers = {"content-type": "application/octet-stream", "content-length": str(path.stat().st_size)}
        return read(Upload, (await self._call("PUT", url, content=Pieces(path), headers=headers)).json()).place

    async def _submit(self, url: str, body: Any, job: dict[str, Any], file: Path | None, **parts: Any) -> Any:
        """Posts a body with a job in it, and again with uploads where the controller sees other files than its."""
        try:
            return (await self._call("POST", url, json=body, **parts)).json()
        except ApiError as error:
            is_elsewhere = error.status == httpx.codes.UNPROCESSABLE_ENTITY and not await self.same_files
            if not is_elsewhere or not (files := files_to_upload(job, error.problems, folders_of(file))):
                raise
        job |= with_places(job, {setting: await self.upload(path) for setting, path in files.items()})
        return (await self._call("POST", url, json=body, **parts)).json()

    def jobs(self, status: str | None = None) -> AsyncIterator[Job]:
        """Yields jobs, newest first, without `spec` and `rewards`: all of them, or those of one status."""
        return self._pages("/v1/jobs", Job, {"status": status} if status else {})

    def rows(self, status: str | None = None) -> AsyncIterator[JobRow]:
        """Yields jobs as rows of the live page, newest first: all of them, or those of one status."""
        return self._pages("/v1/overview", JobRow, {"status": status} if status else {})

    async def sweep_jobs(self, name: str) -> list[JobRow]:
        """Rows of a sweep's jobs, the first queued first. ApiError (404) where there is none."""
        if found := [row async for row in self._pages("/v1/overview", JobRow, {"sweep": name, "limit": MAX_SWEEP})]:
            return found[::-1]
        raise ApiError(404, f"no sweep is called {name!r}; `flowfleet sweep list` lists them")

    async def job(self, job_id: str) -> Job:
        return read(Job, (await self._get(f"/v1/jobs/{job_id}")).json())

    async def find(self, which: str) -> Job:
        """The job that is meant: by its id, the start of one, or its name, of which the newest job is taken; "last" is
        the newest job of all. ApiError (404, 409) where there is none, or more than one id starts so."""
        if len(which) == len(str(uuid.UUID(int=0))):
            return await self.job(which)
        named: Job | None = None
        found: list[Job] = []
        async for job in self.jobs():  # newest first
            if which == "last":
                return await self.job(job.id)
            if job.id.startswith(which):
                found.append(job)
            elif named is None and job.name == which:
                named = job
        if named is None and len(found) > 1:
            raise ApiError(409, f"{len(found)} jobs start with {which!r}: {', '.join(job.id for job in found[:5])}")
        if meant := named or next(iter(found), None):
            return await self.job(meant.id)
        raise ApiError(
            404, f"no job has the id or name {which!r}, or an id that starts so; `flowfleet jobs` lists them"
        )

    async def cancel(self, job_id: str) -> Job:
        return await self._act(job_id, "cancel")

    async def pause(self, job_id: str) -> Job:
        return await self._act(job_id, "pause")

    async def resume(self, job_id: str) -> Job:
        return await self._act(job_id, "resume")

    async def finish(self, job_id: str) -> Job:
        """Ends a job after the steps that are done, with its last validation, checkpoint and model."""
        return await self._act(job_id, "finish")

    async def extend(self, job_id: str, steps: int) -> Job:
        """Gives a job that has not ended `steps` training steps in all."""
        return read(Job, (await self._call("POST", f"/v1/jobs/{job_id}/extend", params={"steps": steps})).json())

    async def prioritize(self, job_id: str, priority: Priority) -> Job:
        """Gives a job another priority: of the seconds that it has waited, `low` counts each once, `normal` 4 times,
        `high` 16 times."""
        answer = await self._call("POST", f"/v1/jobs/{job_id}/priority", params={"priority": priority})
        return read(Job, answer.json())

    async def profile(self, job_id: str, steps: int = 1) -> Job:
        """Has the trainer's ranks profile the next `steps` training steps."""
        return read(Job, (await self._call("POST", f"/v1/jobs/{job_id}/profile", params={"steps": steps})).json())

    async def attach(self, job_id: str) -> AttachCommand:
        """The token of a job whose trainer somebody else starts, and the command that starts it."""
        found = read(AttachCommand, (await self._call("POST", f"/v1/jobs/{job_id}/attach")).json())
        return found.model_copy(update={"command": f"{found.command} {self.url}"})

    async def profiles(self, job_id: str) -> list[Profile]:
        """Profiles of a job's training steps, oldest first."""
        return [read(Profile, row) for row in (await self._get(f"/v1/jobs/{job_id}/profiles")).json()]

    async def delete(self, job_id: str, *, files: bool = False) -> Job:
        """Asks for an ended job to be removed with its history, after it is archived where the controller has an
        archive; `files`: with its checkpoints, models and logs as well. ApiError (409) while it has not ended.
        `flowfleet.client.archive.Archive` reads archives."""
        return read(Job, (await self._call("DELETE", f"/v1/jobs/{job_id}", params={"files": files})).json())

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Returns when the job has ended. TimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (job := await self.job(job_id)).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is still {job.status} after {timeout_s} s")
            await asyncio.sleep(POLL_S)
        return job

    # -- its rewards ---------------------------------------------------------------------------------------------

    async def rewards(self, job_id: str) -> Rewards:
        """Returns a job's rewards with their history, and how its shadows compare."""
        return read(Rewards, (await self._get(f"/v1/jobs/{job_id}/rewards")).json())

    async def change_rewards(
        self,
        job_id: str,
        *,
        set: Mapping[str, Mapping[str, Any]] | None = None,
        shadow: Mapping[str, Mapping[str, Any]] | None = None,
        promote: Sequence[str] = (),
        remove: Sequence[str] = (),
        open_steps: bool = False,
        revision: int | None = None,
    ) -> Rewards:
        """Asks for other rewards from the first step on that is not open yet (docs/rewards.md); `open_steps`: for the
        open ones of a paused job as well, whose samples are scored again. `revision`: what the change builds on; none:
        the newest. ApiError 409 when somebody else changed them meanwhile."""
        newest = (await self.rewards(job_id)).revision if revision is None else revision
        parts = {"set": set or {}, "shadow": shadow or {}, "promote": list(promote), "remove": list(remove)}
        body = {"revision": newest, "open_steps": open_steps, **parts}
        return read(Rewards, (await self._call("PATCH", f"/v1/jobs/{job_id}/rewards", json=body)).json())

    async def wait_for_rewards(self, job_id: str, revision: int, timeout_s: float | None = None) -> Rewards:
        """Returns when a revision, or a newer one, is what the next step will have. TimeoutError after `timeout_s`,
        ApiError (409) when the job ended before."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := await self.job(job_id)).rewards.active.number < revision:
            if job.ended:
                raise ApiError(409, f"the job has {job.status} before its rewards changed")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"revision {revision} has not taken effect after {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        return await self.rewards(job_id)

    # -- what a job leaves ---------------------------------------------------------------------------------------

    async def events(self, job_id: str, after: str | None = None) -> AsyncIterator[JobEvent]:
        """Events as they happen, from the first or the next after an id, until the job has ended.

        Resumes after a broken connection; raises ApiError if the controller stays unreachable.
        """
        failures = 0
        while True:
            try:
                async for event in self._stream(f"/v1/jobs/{job_id}/events", after):
                    after, failures = event.id, 0
                    yield event
                    if event.final:
                        return
                if (await self.job(job_id)).ended:
                    return  # its last event was seen before, or is no longer kept
            except httpx.TransportError as error:
                if failures == len(RETRY_DELAYS_S) or not self._reached:
                    raise unreachable(self.url, error) from None
            except ApiError as error:
                if error.status not in AWAY or failures == len(RETRY_DELAYS_S):
                    raise
            await asyncio.sleep(RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S) - 1)])
            failures += 1

    def metrics(self, job_id: str, after: int = -1) -> AsyncIterator[MetricsRow]:
        """Yields the metrics of the steps after `after`, a row per step, ascending."""
        return self._pages(f"/v1/jobs/{job_id}/metrics", MetricsRow, {"cursor": after} if after >= 0 else {})

    def checkpoints(self, job_id: str) -> AsyncIterator[Checkpoint]:
        return self._pages(f"/v1/jobs/{job_id}/checkpoints", Checkpoint, {})

    async def samples(
        self, job_id: str, *, purpose: str = "train", step: int | None = None, order: str = "newest"
    ) -> AsyncIterator[Sample]:
        """Samples with prompts and scores, whose `image()` gives the picture; `order`: newest, oldest, best, worst."""
        query: Query = {"purpose": purpose, "order": order}
        if step is not None:
            query["step"] = step
        async for sample in self._pages(f"/v1/jobs/{job_id}/samples", Sample, query):
            yield sample.showing(partial(self.image, job_id, sample))

    async def media(self, job_id: str, sample: Sample) -> bytes:
        """The encoded picture of a sample."""
        place = f"{sample.step}/{sample.group}/{sample.index}"
        return (await self._get(f"/v1/jobs/{job_id}/samples/{place}/media", {"purpose": sample.purpose})).content

    async def image(self, job_id: str, sample: Sample) -> Image:
        """The decoded picture of a sample, RGB. ValueError for a video, whose file `media` gives."""
        return picture(await self.media(job_id, sample), sample.media_type)

    async def metrics_frame(self, job_id: str) -> DataFrame:
        """A pandas DataFrame of a job's metrics: a row a step, a column a metric. ValueError without pandas."""
        return metrics_frame([row async for row in self.metrics(job_id)])

    async def samples_frame(self, job_id: str, *, purpose: str = "train", step: int | None = None) -> DataFrame:
        """A pandas DataFrame of a job's samples, oldest first, with a column `scores.NAME` for each score."""
        samples = self.samples(job_id, purpose=purpose, step=step, order="oldest")
        return samples_frame([sample async for sample in samples])

    async def sweep_frame(self, name: str) -> DataFrame:
        """A pandas DataFrame of the metrics of a sweep's jobs, indexed by job and step, with the settings in which the
        jobs differ as columns too. ValueError without pandas."""
        jobs = await self.sweep_jobs(name)
        return sweep_frame([(job, [row async for row in self.metrics(job.id)]) for job in jobs])

    # -- its model ---------------------------------------------------------------------------------------------------

    async def model(self, job_id: str, step: int | None = None) -> ModelManifest:
        """Returns a job's model manifest: of a kept checkpoint's step, else of the longest trained model."""
        query: Query = {} if step is None else {"step": step}
        return ModelManifest.model_validate((await self._get(f"/v1/jobs/{job_id}/model", query)).json())

    async def download_model(self, job_id: str, directory: Path | str, step: int | None = None) -> ModelManifest:
        """Writes a job's model to a folder and checks every file; resumes an earlier download.

        Raises ValueError for a folder that holds something else. Raises ApiError as every call does, also for a file
        that arrived damaged."""

        def fetch(name: str, crc32: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
            query: Query = {"crc32": crc32} if step is None else {"crc32": crc32, "step": step}
            return self._bytes(f"/v1/jobs/{job_id}/model/files/{quote(name)}", query)

        return await download(lambda: self.model(job_id, step), fetch, Path(directory))

    # -- the fleet -----------------------------------------------------------------------------------------------

    async def fleet(self) -> Fleet:
        return read(Fleet, (await self._get("/v1/fleet")).json())

    async def version(self) -> dict[str, Any]:
        return dict((await self._get("/v1/version")).json())

    async def _act(self, job_id: str, action: str) -> Job:
        return read(Job, (await self._call("POST", f"/v1/jobs/{job_id}/{action}")).json())
