"""Models evaluated side by side: a job of no steps for the base model and for each adapter, with the same held-out
prompts, seeds and settings (docs/evaluation.md).

    for model in evaluate(client, Path("eval.toml"), ["job:ID", "job:ID@40", "exports/mine"]):
        print(model.label, model.score("reward"), model.score("ocr"))
"""

import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowfleet import hub
from flowfleet.api.jobs import Job, JobStatus
from flowfleet.api.problems import ApiError
from flowfleet.client.client import Client
from flowfleet.client.connection import POLL_S
from flowfleet.client.evaluation.comparison import Evaluated
from flowfleet.job.adapter_files import lora_settings
from flowfleet.job.files import changed_job, find_job_file, folders_of
from flowfleet.job.migration import today
from flowfleet.job.setting_files import put
from flowfleet.job.spec import JobSpec, parse_job, read_job_file

BASE: Final = "base"
LORA: Final = ("rank", "alpha", "target_modules")
"""Settings of `trainer.lora` that go with an adapter."""
_NAME_LENGTH: Final = 34
_LABEL_LENGTH: Final = 22

Say = Callable[[str], object]


@dataclass(frozen=True)
class Start:
    """A model to evaluate, and the settings that name it."""

    label: str
    settings: Mapping[str, Any]


def evaluate(
    client: Client,
    file: Path | None = None,
    adapters: Sequence[str] = (),
    *,
    origin: str | None = None,
    base: bool = True,
    changes: Sequence[str] = (),
    say: Say = lambda line: None,
) -> list[Evaluated]:
    """Submits an evaluation of each model, waits for all, and returns them in order: the base model, unless `base` is
    False, then the adapters.

    Settings are a job file's, else those of the job `origin` (ID or ID@STEP), with `key=value` changes. Adapters are
    paths, `job:ID` or `job:ID@STEP`; without any, the model of `origin`, or the file's own `model.adapter`. `say` takes
    what becomes of the jobs, a line each. A job that failed has its reason and no samples.

    Raises ValueError and ApiError where an evaluation cannot be submitted; none then remains.
    """
    specs = evaluations(client, file, adapters, origin=origin, base=base, changes=changes, say=say)
    jobs: list[tuple[str, Job]] = []
    try:
        for label, spec in specs:
            jobs.append((label, client.submit(spec, file=None if file is None else find_job_file(file))))
            say(f"{label}: job {jobs[-1][1].id}")
    except (ApiError, ValueError):
        for _, job in jobs:
            client.cancel(job.id)
        raise
    return [_evaluated(client, label, job, say) for label, job in jobs]


def evaluations(
    client: Client,
    file: Path | None,
    adapters: Sequence[str],
    *,
    origin: str | None,
    base: bool,
    changes: Sequence[str],
    say: Say,
) -> list[tuple[str, JobSpec]]:
    """The jobs to submit, each with its label; see `evaluate`."""
    is_here = client.same_files
    data = _settings(client, file, origin, changes, is_here)
    given = data.setdefault("model", {}).pop("adapter", None)
    wanted = list(adapters)
    if not wanted and origin is not None:
        wanted = [f"job:{origin}"]
    elif not wanted and given is not None:
        wanted = [given]
    starts = [Start(BASE, {})] if base else []
    starts += [_start(client, adapter, data, is_here, say) for adapter in wanted]
    if not starts:
        raise ValueError("nothing to evaluate: give --adapter, or leave --no-base out")
    return [(start.label, _spec(data, start)) for start in starts]


def _settings(
    client: Client, file: Path | None, origin: str | None, changes: Sequence[str], is_here: bool
) -> dict[str, Any]:
    """The table of an evaluation without its model's adapter."""
    path = None if file is None else find_job_file(file)
    folders = folders_of(path) if is_here else []
    if path is not None:
        data = read_job_file(path)
    elif origin is not None:
        job = client.find(origin.partition("@")[0])
        data = today(job.spec)
        data["rewards"] = job.rewards.newest.rewards or data["rewards"]
    else:
        raise ValueError("give a job file, or the job to evaluate by --from ID")
    for side in ("height", "width"):  # what is asked for at the command line goes before the job's own
        if any(change.partition("=")[0].strip() == f"rollout.{side}" for change in changes):
            data.get("schedule", {}).pop(f"validation_{side}", None)
    data = changed_job(data, changes, folders)
    trainer, prompts = data.setdefault("trainer", {}), data.setdefault("data", {})
    for name in ("resume", "ema"):
        trainer.pop(name, None)
    trainer["mode"] = "lora"  # full weights are a pipeline by now, and an untrained adapter changes nothing
    put(data, "schedule.steps", 0)
    put(data, "schedule.keep_best", 0)
    _settle_prompts(prompts)
    data["name"] = f"{str(data.get('name', 'job'))[:_NAME_LENGTH]}-eval"
    return data


def _settle_prompts(data: dict[str, Any]) -> None:
    """Lets `data.validation` go before the sources of a job, and names training data, which nothing reads."""
    if data.get("validation"):
        data["sources"], data["train"] = [], data["validation"]
    elif not any(source.get("validation") for source in data.get("sources") or ()):
        raise ValueError("no held-out prompts to evaluate: name them by --set data.validation=FILE or in the job file")


def _start(client: Client, adapter: str, data: Mapping[str, Any], is_here: bool, say: Say) -> Start:
    if adapter.startswith("job:"):
        return _of_job(client, adapter, data, is_here, say)
    path = Path(adapter)
    if is_here and path.exists():
        known = {f"trainer.lora.{name}": value for name, value in lora_settings(path).items()}
        return Start(adapter, {"model.adapter": str(path.absolute()), **known})
    return Start(adapter, {"model.adapter": adapter})


def _of_job(client: Client, adapter: str, data: Mapping[str, Any], is_here: bool, say: Say) -> Start:
    name, _, text = adapter.removeprefix("job:").partition("@")
    if text and not text.isdecimal():
        raise ValueError(f"{adapter!r}: give a job's model as job:ID, and that of a checkpoint as job:ID@STEP")
    job = client.find(name)
    found = client.model(job.id, int(text) if text else None)
    is_pinned = bool(text) or not job.ended  # a running job's newest model may be another one soon
    place = f"job:{job.id}@{found.step}" if is_pinned else f"job:{job.id}"
    if found.kind == "pipeline":
        return Start(adapter, {"model.path": place})
    trained, used = str(job.spec["model"]["path"]), str(data["model"].get("path"))
    if not _is_same_model(trained, used, is_here):
        say(f"warning: {adapter} was trained on {trained}, and is evaluated on {used}")
    lora = {f"trainer.lora.{name}": job.spec["trainer"]["lora"].get(name) for name in LORA}
    return Start(adapter, {"model.adapter": place, **lora})


def _is_same_model(trained: str, used: str, is_here: bool) -> bool:
    """True if two places hold the same model. A Hub name without a commit matches each of its model's commits."""
    first, second = hub.origin_of(trained), hub.origin_of(used)
    if first is not None and second is not None and first.repo == second.repo:
        return first.revision == second.revision or not (first.is_pinned and second.is_pinned)
    return trained == used or (is_here and Path(trained).resolve() == Path(used).resolve())


def _spec(data: Mapping[str, Any], start: Start) -> JobSpec:
    own = copy.deepcopy(dict(data))
    for name, value in start.settings.items():
        put(own, name, value)
    label = re.sub(r"[^a-z0-9]+", "-", start.label.lower())[-_LABEL_LENGTH:]
    own["name"] = f"{own['name']}-{label.strip('-')}".rstrip("-")
    return parse_job(own)


def _evaluated(client: Client, label: str, job: Job, say: Say) -> Evaluated:
    """Waits for the end, and tells each new status and reason."""
    told, job = (job.status, ""), client.job(job.id)
    while True:
        if (job.status, job.reason) != told:
            told = (job.status, job.reason)
            say(f"{label}: {job.status}" + (f": {job.reason}" if job.reason else ""))
        if job.ended:
            break
        time.sleep(POLL_S)
        job = client.job(job.id)
    has_samples = job.status is JobStatus.SUCCEEDED
    samples = client.samples(job.id, purpose="validate", step=0, order="oldest") if has_samples else ()
    return Evaluated(label, job, tuple(samples))
