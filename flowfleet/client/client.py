"""The Python client of Flowfleet: all that the command line does, and nothing that it cannot.

    with Client("http://127.0.0.1:8470") as client:
        job = client.submit(Path("recipes/tiny_ocr.toml"))
        for event in client.events(job.id):
            print(event.type, event.data)
        print(client.job(job.id).results)

Every call raises `ApiError`, in the API's own words, when the call is rejected or no controller answers. If a
controller that answered before is unreachable, calls are retried for a few seconds. Every call may be repeated, submits
too, since each carries an Idempotency-Key.
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from flowfleet.client.download import download
from flowfleet.client.sse import parse_events
from flowfleet.client.types import (
    Answer,
    ApiError,
    Checkpoint,
    Fleet,
    Job,
    JobEvent,
    MetricsRow,
    Rewards,
    Sample,
    SettingProblem,
    Upload,
    read,
)
from flowfleet.client.uploading import Pieces, digest_of, with_uploads
from flowfleet.filesystem import filesystem_id
from flowfleet.job.files import find_job_file, prepare_job
from flowfleet.job.model_files import ModelManifest
from flowfleet.job.spec import JobSpec
from flowfleet.prompts.uploads import name_of

CA = "FLOWFLEET_CA"
DEFAULT_URL = "http://127.0.0.1:8470"
TIMEOUT_S = 30.0
STREAM_SILENCE_S = 60.0
"""The controller sends a sign of life more often than this while nothing happens."""
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0)
AWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
PAGE_SIZE = 100

T = TypeVar("T", bound=Answer)
Query = dict[str, str | int]


class Client:
    """Synchronous; one connection pool, closed at the end of a `with` block. `transport` is for tests.

    Of https URLs `ca` (else FLOWFLEET_CA) is the PEM file of a private CA, trusted in place of the system's.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca: Path | str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get("FLOWFLEET_URL") or DEFAULT_URL).rstrip("/")
        key = (api_key or os.environ.get("FLOWFLEET_API_KEY", "")).strip()
        ca = ca or os.environ.get(CA)
        self.has_key = bool(key)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            transport=transport,
            verify=_trusting(ca) if ca else True,
            trust_env=not self.on_this_machine,  # no proxy stands between here and loopback
        )
        self._reached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @property
    def same_files(self) -> bool:
        """Whether the controller sees the files of this process. Asks it, for loopback may be a forwarded port."""
        return self.on_this_machine and self.version().get("filesystem") == filesystem_id()

    @property
    def on_this_machine(self) -> bool:
        """Whether the controller is reached by loopback."""
        host = urlsplit(self.url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit(
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
            job = prepare_job(file, same_machine=self.same_files)
        body = job.model_dump(mode="json") if isinstance(job, JobSpec) else dict(job)
        headers = {"idempotency-key": idempotency_key or str(uuid.uuid4())}
        try:
            return self._submit(body, headers)
        except ApiError as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY or self.same_files:
                raise
            folders = [Path.cwd(), *(file.resolve().parents if file else ())]
            changed = with_uploads(body, error.problems, folders, self.upload)
            if changed is None:
                raise
        return self._submit(changed, headers)

    def upload(self, path: Path | str) -> str:
        """Sends a prompt file to the controller. Returns how a job names it in `data.train`, `data.validation` or a
        source, as `upload:SHA256/NAME`. Media that its prompts name are not sent."""
        path = Path(path)
        if path.is_dir():
            raise ValueError(f"{path} is a folder: upload one file, such as .parquet")
        url = f"/v1/uploads/{digest_of(path)}/{name_of(path)}"
        headers = {"content-type": "application/octet-stream", "content-length": str(path.stat().st_size)}
        return read(Upload, self._call("PUT", url, content=Pieces(path), headers=headers).json()).place

    def _submit(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Job:
        return read(Job, self._call("POST", "/v1/jobs", json=body, headers=headers).json())

    def jobs(self, status: str | None = None) -> Iterator[Job]:
        """All jobs, or those of one status, newest first."""
        return self._pages("/v1/jobs", Job, {"status": status} if status else {})

    def job(self, job_id: str) -> Job:
        return read(Job, self._get(f"/v1/jobs/{job_id}").json())

    def find(self, which: str) -> Job:
        """The job that is meant: by its id, the start of one, or its name, of which the newest job is taken; "last" is
        the newest job of all. ApiError (404, 409) where there is none, or more than one id starts so."""
        if len(which) == len(str(uuid.UUID(int=0))):
            return self.job(which)
        named: Job | None = None
        found: list[Job] = []
        for job in self.jobs():  # newest first
            if which == "last":
                return job
            if job.id.startswith(which):
                found.append(job)
            elif named is None and job.name == which:
                named = job
        if named is None and len(found) > 1:
            raise ApiError(409, f"{len(found)} jobs start with {which!r}: {', '.join(job.id for job in found[:5])}")
        if found or named:
            return named or found[0]
        raise ApiError(
            404, f"no job has the id or name {which!r}, or an id that starts so; `flowfleet jobs` lists them"
        )

    def cancel(self, job_id: str) -> Job:
        return self._act(job_id, "cancel")

    def pause(self, job_id: str) -> Job:
        return self._act(job_id, "pause")

    def resume(self, job_id: str) -> Job:
        return self._act(job_id, "resume")

    def finish(self, job_id: str) -> Job:
        """Ends a job after the steps that are done, with its last validation, checkpoint and model."""
        return self._act(job_id, "finish")

    def extend(self, job_id: str, steps: int) -> Job:
        """Gives a job that has not ended `steps` training steps in all."""
        return read(Job, self._call("POST", f"/v1/jobs/{job_id}/extend", params={"steps": steps}).json())

    def delete(self, job_id: str) -> Job:
        """Asks for an ended job to be removed with its history, after it is archived where the controller has an
        archive. ApiError (409) while it has not ended. `flowfleet.client.archive.Archive` reads archives."""
        return read(Job, self._call("DELETE", f"/v1/jobs/{job_id}").json())

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Returns when the job has ended. TimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (job := self.job(job_id)).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is still {job.status} after {timeout_s} s")
            time.sleep(0.5)
        return job

    # -- its rewards ---------------------------------------------------------------------------------------------

    def rewards(self, job_id: str) -> Rewards:
        """Returns a job's rewards with their history, and how its shadows compare."""
        return read(Rewards, self._get(f"/v1/jobs/{job_id}/rewards").json())

    def change_rewards(
        self,
        job_id: str,
        *,
        set: Mapping[str, Mapping[str, Any]] | None = None,
        shadow: Mapping[str, Mapping[str, Any]] | None = None,
        promote: Sequence[str] = (),
        remove: Sequence[str] = (),
        revision: int | None = None,
    ) -> Rewards:
        """Asks for other rewards from the first step on that is not open yet (docs/rewards.md). `revision`: what the
        change builds on; none: the newest. ApiError 409 when somebody else changed them meanwhile."""
        newest = self.rewards(job_id).revision if revision is None else revision
        parts = {"set": set or {}, "shadow": shadow or {}, "promote": list(promote), "remove": list(remove)}
        body = {"revision": newest, **parts}
        return read(Rewards, self._call("PATCH", f"/v1/jobs/{job_id}/rewards", json=body).json())

    def wait_for_rewards(self, job_id: str, revision: int, timeout_s: float | None = None) -> Rewards:
        """Returns when a revision, or a newer one, is what the next step will have. TimeoutError after `timeout_s`,
        ApiError (409) when the job ended before."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := self.job(job_id)).rewards.active.number < revision:
            if job.ended:
                raise ApiError(409, f"the job has {job.status} before its rewards changed")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"revision {revision} has not taken effect after {timeout_s:g} s")
            time.sleep(0.5)
        return self.rewards(job_id)

    # -- what a job leaves ---------------------------------------------------------------------------------------

    def events(self, job_id: str, after: str | None = None) -> Iterator[JobEvent]:
        """Events as they happen, from the first or the next after an id, until the job has ended.

        Resumes after a broken connection; raises ApiError if the controller stays unreachable.
        """
        failures = 0
        while True:
            try:
                for event in self._stream(job_id, after):
                    after, failures = event.id, 0
                    yield event
                    if event.final:
                        return
                if self.job(job_id).ended:
                    return  # its last event was seen before, or is no longer kept
            except httpx.TransportError as error:
                if failures == len(RETRY_DELAYS_S) or not self._reached:
                    raise self._away(error) from None
            except ApiError as error:
                if error.status not in AWAY or failures == len(RETRY_DELAYS_S):
                    raise
            time.sleep(RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S) - 1)])
            failures += 1

    def metrics(self, job_id: str, after: int = -1) -> Iterator[MetricsRow]:
        """One row a step, ascending, of the steps after one."""
        return self._pages(f"/v1/jobs/{job_id}/metrics", MetricsRow, {"cursor": after} if after >= 0 else {})

    def checkpoints(self, job_id: str) -> Iterator[Checkpoint]:
        return self._pages(f"/v1/jobs/{job_id}/checkpoints", Checkpoint, {})

    def samples(
        self, job_id: str, *, purpose: str = "train", step: int | None = None, order: str = "newest"
    ) -> Iterator[Sample]:
        """Samples with prompts and scores; `order`: newest, oldest, best, worst."""
        query: Query = {"purpose": purpose, "order": order}
        if step is not None:
            query["step"] = step
        return self._pages(f"/v1/jobs/{job_id}/samples", Sample, query)

    def media(self, job_id: str, sample: Sample) -> bytes:
        """The encoded picture of a sample."""
        place = f"{sample.step}/{sample.group}/{sample.index}"
        return self._get(f"/v1/jobs/{job_id}/samples/{place}/media", {"purpose": sample.purpose}).content

    # -- its model ---------------------------------------------------------------------------------------------------

    def model(self, job_id: str, step: int | None = None) -> ModelManifest:
        """What a job's model is: of a kept checkpoint's step, else the one that was trained longest."""
        query: Query = {} if step is None else {"step": step}
        return ModelManifest.model_validate(self._get(f"/v1/jobs/{job_id}/model", query).json())

    def download_model(self, job_id: str, directory: Path | str, step: int | None = None) -> ModelManifest:
        """Writes a job's model to a folder and checks every file; resumes an earlier download.

        Raises ValueError for a folder that holds something else. Raises ApiError as every call does, also for a file
        that arrived damaged."""

        def fetch(name: str, crc32: str) -> AbstractContextManager[Iterator[bytes]]:
            query: Query = {"crc32": crc32} if step is None else {"crc32": crc32, "step": step}
            return self._bytes(f"/v1/jobs/{job_id}/model/files/{quote(name)}", query)

        return download(lambda: self.model(job_id, step), fetch, Path(directory))

    # -- the fleet -----------------------------------------------------------------------------------------------

    def fleet(self) -> Fleet:
        return read(Fleet, self._get("/v1/fleet").json())

    def version(self) -> dict[str, Any]:
        return dict(self._get("/v1/version").json())

    # -- transport -----------------------------------------------------------------------------------------------

    def _act(self, job_id: str, action: str) -> Job:
        return read(Job, self._call("POST", f"/v1/jobs/{job_id}/{action}").json())

    def _get(self, path: str, query: Query | None = None) -> httpx.Response:
        return self._call("GET", path, params=query or {})

    def _pages(self, path: str, kind: type[T], query: Query) -> Iterator[T]:
        query = {**query, "limit": PAGE_SIZE}
        while True:
            page = self._get(path, query).json()
            yield from (read(kind, item) for item in page["items"])
            if not page.get("next_cursor"):
                return
            query["cursor"] = page["next_cursor"]

    def _call(self, method: str, path: str, **parts: Any) -> httpx.Response:
        """Sends one request; retries while a controller that answered before is unreachable."""
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                response = self._http.request(method, path, **parts)
            except httpx.TransportError as error:
                if delay_s is None or not self._reached:
                    raise self._away(error) from None
            else:
                self._reached = True
                if response.status_code not in AWAY or delay_s is None:
                    return _checked(response)
            assert delay_s is not None
            time.sleep(delay_s)
        raise AssertionError("the last try returns or raises")

    def _stream(self, job_id: str, after: str | None) -> Iterator[JobEvent]:
        headers = {"accept": "text/event-stream", **({"last-event-id": after} if after else {})}
        timeout = httpx.Timeout(TIMEOUT_S, read=STREAM_SILENCE_S)
        with self._http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers, timeout=timeout) as response:
            self._reached = True
            if response.is_error:
                response.read()
            _checked(response)
            for event in parse_events(response.iter_lines()):
                yield read(JobEvent, event.data)

    @contextmanager
    def _bytes(self, path: str, query: Query) -> Iterator[Iterator[bytes]]:
        """The body of an answer as it comes."""
        try:
            with self._http.stream("GET", path, params=query) as response:
                if response.is_error:
                    response.read()
                yield _checked(response).iter_bytes()
        except httpx.TransportError as error:
            raise self._away(error) from None

    def _away(self, error: httpx.TransportError) -> ApiError:
        text = str(error) or type(error).__name__
        advice = "start one with `flowfleet up`"
        if "CERTIFICATE_VERIFY_FAILED" in text:
            advice = f"its certificate is not trusted: give the CA that signed it by --ca or {CA}"
        elif "WRONG_VERSION_NUMBER" in text:
            advice = "it speaks no TLS: use http://"
        elif isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and self.url.startswith("http://"):
            advice = "if it speaks TLS, use https://"
        return ApiError(0, f"no controller answers at {self.url} ({text}); {advice}")


def _trusting(ca: Path | str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ValueError(f"{ca}, given by --ca or {CA}, holds no PEM certificates ({error})") from None


def _checked(response: httpx.Response) -> httpx.Response:
    """The response itself, or the ApiError that it tells."""
    if response.is_success:
        return response
    try:
        problem = response.json()
        detail = str(problem.get("detail") or problem.get("title"))
        problems = tuple(read(SettingProblem, item) for item in problem.get("errors") or ())
    except (ValueError, AttributeError):
        detail, problems = f"{response.status_code} {response.reason_phrase}", ()
    raise ApiError(response.status_code, detail, problems)
