"""Settings of the other kind of policy are refused by name."""

from typing import Any

import pytest

from flowfleet.algorithms import registry
from flowfleet.job.rules.sequences import refusal
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.registry import FAMILIES


def job(algorithm: str, /, **parts: Any) -> JobSpec:
    base: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "data.jsonl"},
        "rewards": {"exact_match": {}},
        "algorithm": {"name": algorithm},
    }
    return parse_job({**base, **{name: {**base.get(name, {}), **part} for name, part in parts.items()}})


@pytest.mark.parametrize(("name", "low", "high"), [("gspo", 3e-4, 4e-4), ("grpo", None, 0.2), ("dapo", 0.2, 0.28)])
def test_algorithms_bring_their_published_limits(name: str, low: float | None, high: float) -> None:
    spec = job(name)
    algorithm: Any = spec.algorithm
    assert (algorithm.clip_range_low, algorithm.clip_range) == (low, high)
    assert spec.writes_tokens
    assert not spec.records_steps
    assert algorithm.advantage_std == "group"
    assert parse_job(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("rollout", {"window": {"size": 3}}, "rollout.window.size"),
        ("rollout", {"noise": {"eta": 0.0}}, "rollout.noise.eta"),
        ("rollout", {"guidance_scale": 4.0}, "rollout.guidance_scale"),
        ("rollout", {"height": 256}, "rollout.height"),
        ("rollout", {"num_inference_steps": 20}, "rollout.num_inference_steps"),
        ("schedule", {"validation_steps": 20}, "schedule.validation_steps"),
        ("algorithm", {"old_policy": {"max": 0.9}}, "algorithm.old_policy"),
        ("algorithm", {"kl_reward": 0.1}, "algorithm.kl_reward"),
        ("algorithm", {"clip_nats": 0.5}, "algorithm.clip_nats"),
        ("algorithm", {"overlong_share": 0.1, "reward_combination": "normalized"}, "algorithm.overlong_share"),
        ("trainer", {"samples": "idle"}, "trainer.samples"),
        ("trainer", {"micro_batch_size": 4}, "trainer.micro_batch_size"),
        ("model", {"max_sequence_length": 64}, "model.max_sequence_length"),
        ("model", {"base": "fp8"}, "model.base"),
        ("trainer", {"quantization": "fp8", "mode": "full"}, "trainer.quantization"),
    ],
)
def test_a_sequence_policy_refuses_what_only_flows_read(part: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        job("grpo", **{part: settings})


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("rollout", {"sequence": {"max_tokens": 64}}, "rollout.sequence.max_tokens"),
        ("rollout", {"sequence": {"temperature": 0.5}}, "rollout.sequence.temperature"),
        ("trainer", {"micro_batch_tokens": 64}, "trainer.micro_batch_tokens"),
        ("algorithm", {"aggregation": "token"}, "algorithm.aggregation"),
    ],
)
def test_a_flow_refuses_what_only_sequences_read(part: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        job("flow_grpo", **{part: settings})


@pytest.mark.parametrize(("name", "value"), [("flow_grpo", False), ("gspo", False), ("gspo", True)])
def test_stored_jobs_that_name_routed_experts_are_read(name: str, value: bool) -> None:
    """A stored job names every setting, with the default of its time."""
    data = job(name).model_dump(mode="json")
    assert data["rollout"]["sequence"]["routed_experts"] is True
    data["rollout"]["sequence"]["routed_experts"] = value
    assert parse_job(data).rollout.sequence.routed_experts is value


def test_the_algorithms_that_a_model_which_writes_text_may_have_are_those_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, loss = FAMILIES["Qwen3ForCausalLM"], registry.LOSSES["gspo"]
    assert refusal(family, registry.LOSSES["dpo"]).endswith("choose algorithm.name from dapo, grpo, gspo")
    own = registry.Algorithm("cispo", "CISPO", "https://arxiv.org/abs/2506.13585", "Another.", loss=loss.name)
    monkeypatch.setitem(registry.ALGORITHMS, own.name, own)
    assert "cispo, dapo" in refusal(family, registry.LOSSES["dpo"])
    assert refusal(family, loss) == ""
    assert "is a flow" in refusal(FAMILIES["FluxPipeline"], loss)


def test_gspo_has_one_aggregation() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.aggregation has no effect with algorithm\.loss = gspo"):
        job("gspo", algorithm={"aggregation": "token"})
