"""What the controller asks for is what rollout and trainer take: its requests against their own checks, for every
algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.redis import keys
from flowfleet.seeds import sample_seed
from services.controller.job import requests
from services.controller.job.credit import credits_of
from services.controller.job.machine import events as ev
from services.controller.job.machine.batch import Scored
from services.controller.rewards.composition import PREFERENCE
from services.controller.rewards.job_rewards import SampleScore
from services.rollout.sampling.requests import generation_request
from services.trainer.step.requests import check_request, pairs_of
from tests.e2e.matrix.choice import least_settings

FLOWS = sorted(name for name, known in ALGORITHMS.items() if LOSSES[known.loss].kind != "sequence")
SEQUENCES = sorted(ALGORITHMS.keys() - set(FLOWS))
SIZE: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 5}
BLOB = common_pb2.BlobRef(uri="redis:x", size_bytes=1, sha256="00")


def spec_of(name: str) -> JobSpec:
    group_size = 2 if ALGORITHMS[name].data == "preferences" else 4
    rollout: dict[str, Any] = {"prompts_per_step": 3, "group_size": group_size}
    if name in FLOWS:
        rollout |= {**SIZE, "guidance_scale": 2.0, "embedded_guidance": 0.0}
    if LOSSES[ALGORITHMS[name].loss].kind == "gradient":
        rollout |= {"num_frames": 1}
    job = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.jsonl"}}
    return parse_job({**job, "algorithm": {"name": name, **least_settings(ALGORITHMS[name])}, "rollout": rollout})


class Samples:
    """Samples in the form that `SampleRefs` gives."""

    def __init__(self, spec: JobSpec) -> None:
        size = spec.rollout.size
        self._size: dict[str, Any] = {"height": size.height, "width": size.width, "num_frames": size.num_frames}
        self._steps = [1] if spec.loss.from_steps else [1, 2]

    async def get(self, step: int, places: Sequence[tuple[int, int]]) -> list[common_pb2.Sample]:
        return [self._sample(*place) for place in places]

    def _sample(self, group: int, index: int) -> common_pb2.Sample:
        place = common_pb2.SampleId(job_id="job", step=2, group=group, index=index)
        tokens: dict[str, Any] = {"num_tokens": 5, "prompt_tokens": 3}
        return common_pb2.Sample(
            **tokens,
            **self._size,
            id=place,
            sde_steps=self._steps,
            trajectory=BLOB,
            prompt_embeds=BLOB,
            negative_embeds=BLOB,
        )


def context(spec: JobSpec) -> Any:
    prompts = [Prompt(name) for name in "abc"]
    machine = SimpleNamespace(training_rewards_at=lambda step: spec.rewards)
    rewards = {"rewards": lambda prompt, step: spec.rewards, "machine": machine}
    return SimpleNamespace(job_id="job", spec=spec, prompts=lambda step: prompts, refs=Samples(spec), **rewards)


@pytest.mark.parametrize("name", FLOWS)
def test_a_rollout_takes_what_the_controller_asks_for(name: str) -> None:
    spec = spec_of(name)
    wanted = {group: list(range(spec.rollout.group_size)) for group in (0, 2)}
    wire = requests.generate(context(spec), 2, wanted)
    if spec.method.data == "preferences":
        for group in wire.groups:
            group.media.extend([common_pb2.Media(blob=BLOB, media_type="video/mp4")] * 2)
    request = generation_request(wire)
    assert request.record == ("steps" if spec.records_steps else "final")
    assert request.sampling.size == spec.rollout.size
    assert request.sampling.guidance == spec.rollout.guidance
    assert [group.indices for group in request.groups] == [tuple(indices) for indices in wanted.values()]
    assert (request.noise.steps != ()) == (spec.rollout.noise.eta > 0 or spec.loss.from_steps)
    held_out = generation_request(requests.validate(context(spec), 2, 5, [Prompt("a"), Prompt("b")]))
    assert (held_out.record, [group.group for group in held_out.groups]) == ("none", [5, 6])


def test_more_samples_of_a_held_out_prompt_leave_the_first_as_it_was() -> None:
    spec = spec_of("flow_grpo")
    data = spec.model_dump(mode="json")
    data["data"]["validation"], data["schedule"]["validation_samples"] = "v.txt", 3
    (one,) = requests.validate(context(spec), 0, 4, [Prompt("a")]).groups
    (three,) = generation_request(requests.validate(context(parse_job(data)), 0, 4, [Prompt("a")])).groups
    assert (three.indices, three.seeds[0]) == ((0, 1, 2), one.seeds[0])
    assert len(set(three.seeds)) == 3


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_model_that_writes_text_is_asked_for_tokens_and_for_nothing_of_a_flow(name: str) -> None:
    data = spec_of(name).model_dump(mode="json")
    asked = {"max_tokens": 9, "temperature": 0.5, "stop": ["END"], "max_prompt_tokens": 7}
    data["rollout"]["sequence"] = {**asked, "validation_temperature": 0.25, "routed_experts": True}
    spec = parse_job(data)
    wire = requests.generate(context(spec), 2, {0: [0, 1], 2: [3]})
    assert wire.record == common_pb2.RECORD_TOKENS
    assert wire.sampling == rollout_pb2.Sampling(
        sequence=rollout_pb2.SequenceSampling(**asked, top_p=1.0, routed_experts=True)  # type: ignore[arg-type]
    )
    assert (wire.HasField("noise"), wire.reference_kl) == (False, False)
    assert [(group.group, [*group.indices]) for group in wire.groups] == [(0, [0, 1]), (2, [3])]
    held_out = requests.validate(context(spec), 2, 5, [Prompt("a")])
    assert held_out.sampling.sequence == rollout_pb2.SequenceSampling(**{**asked, "top_p": 1.0, "temperature": 0.25})  # type: ignore[arg-type]
    assert held_out.record == common_pb2.RECORD_UNSPECIFIED


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"num_tokens": 10}, "its number of tokens is 10, asked for was 9"),
        ({"num_tokens": 0}, "its number of tokens is 0, asked for was 1"),
        ({"prompt_tokens": 8}, "its number of prompt tokens is 8, asked for was 7"),
        ({"media_type": "image/png"}, "its media type is image/png, asked for was text/plain"),
    ],
)
def test_a_text_that_is_not_as_it_was_asked_for_is_told(changes: dict[str, Any], problem: str) -> None:
    data = spec_of("gspo").model_dump(mode="json")
    data["rollout"]["sequence"] = {"max_tokens": 9, "max_prompt_tokens": 7}
    spec = parse_job(data)
    job = context(spec)
    job.machine, job.blobs = SimpleNamespace(steps=9), SimpleNamespace(uri=lambda key: f"redis:{key}")
    blob = common_pb2.BlobRef(uri=f"redis:{keys.blob('job')}x", size_bytes=1)
    place = common_pb2.SampleId(job_id="job", step=2, group=0, index=1)
    facts = {"num_tokens": 9, "prompt_tokens": 7, "media_type": "text/plain", **changes}
    sample = common_pb2.Sample(
        id=place, seed=sample_seed(spec.seed, 2, 0, 1), trajectory=blob, prompt_embeds=blob, media=blob, **facts
    )
    assert requests.misfit(job, sample) == problem


def test_length_costs_only_where_it_is_asked_for() -> None:
    """DAPO's penalty is subtracted before advantages are taken: equal rewards differ by their lengths."""
    data = spec_of("dapo").model_dump(mode="json")
    data["rollout"]["sequence"] = {"max_tokens": 100}
    spec = parse_job(data)
    verdict = SampleScore(1.0, rewards={"ocr": 1.0})
    scored = []
    for index, num_tokens in enumerate((10, 80, 90, 100)):
        sample = common_pb2.Sample(id=common_pb2.SampleId(index=index), num_tokens=num_tokens)
        fact = requests.scored_or_dropped(spec, sample, verdict)
        assert isinstance(fact, ev.Scored)
        scored.append(Scored(0, index, fact.score, fact.scores))
    credits, _ = credits_of(spec, spec.rewards, 0, scored)
    rewards = np.array([1.0, 1.0, 0.5, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    np.testing.assert_allclose([credit.advantage for credit in credits], expected, rtol=1e-6)
    assert [credit.reward for credit in credits] == [1.0] * 4
    fact = requests.scored_or_dropped(spec_of("gspo"), sample, verdict)
    assert isinstance(fact, ev.Scored)
    assert fact.scores == {"ocr": 1.0}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
async def test_a_trainer_takes_what_the_controller_sends(name: str) -> None:
    spec = spec_of(name)
    reward = PREFERENCE if spec.method.data == "preferences" else "ocr"
    size = spec.rollout.group_size
    scored = [
        Scored(group, index, score, {reward: score})
        for group in range(3)
        for index in range(size)
        for score in [0.5 if group == 1 else 1.0 - index]
    ]
    credits, _ = credits_of(spec, spec.rewards, 2, scored)
    wire = await requests.train_step(context(spec), 2, credits)
    keys = check_request(wire, spec)
    pairs = [(keys[winner], keys[loser]) for winner, loser in pairs_of(wire, spec)]
    if spec.loss.needs_pairs:
        assert pairs == [((0, 0), (0, size - 1)), ((2, 0), (2, size - 1))]
    else:
        assert (keys, pairs) == ([(group, index) for group in range(3) for index in range(size)], [])


@pytest.mark.parametrize(
    ("max_staleness", "deterministic", "gives_way"), [(0, False, False), (1, False, True), (1, True, False)]
)
def test_what_has_not_begun_takes_the_newer_version_where_versions_may_mix(
    max_staleness: int, deterministic: bool, gives_way: bool
) -> None:
    job = spec_of("flow_grpo").model_dump(mode="json")
    job["schedule"]["max_staleness"], job["trainer"]["deterministic"] = max_staleness, deterministic
    assert requests.generate(context(parse_job(job)), 2, {0: [0, 1]}).gives_way == gives_way
