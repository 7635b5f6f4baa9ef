"""The controller's part of a model card: how the training went, as far as it is known when the model is written."""

import json
from collections.abc import Iterator, Mapping, Sequence

from flowfleet.algorithms.settings import KlRewardSettings
from flowfleet.job.spec import JobSpec, RewardPart
from services.controller.job.context import JobContext
from services.controller.store.records import SampleRecord, Validation

MAX_ROWS = 40
"""Validations of the curve; of more, the newest and every so many before."""
MAX_PROMPTS = 8
MAX_TEXT = 160


async def training_card(job: JobContext) -> str:
    """Recipe, curve, before and after, prompts, rewards and guards."""
    known = await job.store.history.validations(job.job_id)
    versions = [known[0].version, known[-1].version] if known else []
    shown = [await job.store.samples.page(job.job_id, purpose="validate", step=v, order="oldest", limit=MAX_PROMPTS)
             for v in versions]  # fmt: skip
    rewards = job.machine.rewards_at(job.machine.state.version)
    sections = [
        ("Curve", _curve(known)),
        ("Held-out prompts, before and after", _prompts(*(records for records, _ in shown)) if shown else ()),
        ("Rewards", _rewards(rewards, [sample for records, _ in shown for sample in records])),
        ("Guards", _guards(job.spec, rewards, known)),
        ("Recipe", _recipe(job.submitted)),
    ]
    return "\n".join(line for title, lines in sections for line in _section(title, list(lines)))


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def _curve(known: Sequence[Validation]) -> Iterator[str]:
    if not known:
        yield "The job has no held-out prompts, so nothing was validated."
        return
    yield "| steps | held-out reward | revision of the rewards |"
    yield "| ---: | ---: | ---: |"
    each = -(-len(known) // MAX_ROWS)
    for one in (one for place, one in enumerate(known) if (len(known) - 1 - place) % each == 0 or place == 0):
        yield f"| {one.version} | {_number(one.reward)} | {one.revision} |"
    first, last = known[0], known[-1]
    if first.version != last.version:
        changed = ", by other rewards" if first.revision != last.revision else ""
        yield ""
        yield f"Before training: {_number(first.reward)}. After {last.version} steps: {_number(last.reward)}{changed}."


def _prompts(before: Sequence[SampleRecord], after: Sequence[SampleRecord]) -> Iterator[str]:
    if not before:
        return
    rewards = {(sample.group, sample.index): sample.reward for sample in after}
    yield "| prompt | before | after |"
    yield "| --- | ---: | ---: |"
    for sample in before:
        then = rewards.get((sample.group, sample.index))
        yield f"| {_cell(sample.prompt)} | {_number(sample.reward)} | {_number(then)} |"


def _rewards(rewards: Mapping[str, RewardPart], samples: Sequence[SampleRecord]) -> Iterator[str]:
    for name, part in rewards.items():
        versions = sorted({sample.versions[name] for sample in samples if name in sample.versions})
        scorer = f", scored by {', '.join(versions)}" if versions else ""
        yield f"- `{name}` (service `{part.service_of(name)}`), weight {part.weight:g}{scorer}"


def _guards(spec: JobSpec, rewards: Mapping[str, RewardPart], known: Sequence[Validation]) -> Iterator[str]:
    for name, part in rewards.items():
        if part.gate is not None:
            low = part.gate.below is not None
            limit = part.gate.below if low else part.gate.above
            yield f"- `{name}`: {part.gate.action} samples that score {'below' if low else 'above'} {limit:g}"
    for setting, value in (("kl_coef", spec.kl.kl_coef), ("kl_reward", spec.algorithm.of(KlRewardSettings).kl_reward)):
        if value:
            yield f"- `algorithm.{setting} = {value:g}`"
    if known:
        for name in ("val/edge_density", "val/colour_entropy"):
            first, last = (_number(one.values.get(name)) for one in (known[0], known[-1]))
            yield f"- `{name}`: {first} before, {last} after"


def _recipe(spec: JobSpec) -> Iterator[str]:
    yield "`flowfleet submit` takes these settings as a .json file."
    yield ""
    yield "```json"
    yield json.dumps(spec.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False)
    yield "```"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cell(text: str) -> str:
    """A prompt inside a table's cell."""
    plain = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return plain if len(plain) <= MAX_TEXT else f"{plain[:MAX_TEXT]}…"
