"""Requests as they arrive: what survives the wire. What is refused is tested on the running service."""

from typing import Any

import pytest

from flowfleet.models.settings import Guidance, Size
from flowfleet.proto import common_pb2, rollout_pb2
from services.rollout.engines.base import Noise, PromptGroup, Sampling
from services.rollout.sampling.requests import generation_request


def test_a_request_arrives_as_it_was_meant() -> None:
    """Settings keep all their digits, for the trainer computes with them too; rows come in (group, index) order."""
    sent = rollout_pb2.GenerateRequest(
        job_id="job",
        purpose=common_pb2.PURPOSE_TRAIN,
        sampling=rollout_pb2.Sampling(
            height=32, width=48, num_inference_steps=6, guidance_scale=4.1, negative_prompt="blurry", shift=3.1
        ),
        noise=rollout_pb2.Noise(
            step_type="sde", eta=0.7, sde_steps=[0, 2], share_initial_noise=True, recorded_steps=[2], tail_steps=2
        ),
        groups=[
            rollout_pb2.PromptGroup(group=5, prompt="b", indices=[3, 1], seeds=[33, 2**64 - 1], initial_seed=9),
            rollout_pb2.PromptGroup(group=2, prompt="a", indices=[0], seeds=[7]),
        ],
    )
    request = generation_request(rollout_pb2.GenerateRequest.FromString(sent.SerializeToString()))
    assert request.groups == (PromptGroup(2, "a", (0,), (7,)), PromptGroup(5, "b", (1, 3), (2**64 - 1, 33), 9))
    assert request.sampling == Sampling(Size(32, 48), 6, Guidance(4.1), "blurry", shift=3.1)
    assert request.noise == Noise("sde", 0.7, (0, 2), share_initial=True, tail_steps=2, recorded=(2,))
    assert request.record == "steps"
    assert request.num_samples == 3


def test_settings_of_videos_edits_and_distilled_models_arrive() -> None:
    sent = rollout_pb2.GenerateRequest(
        job_id="job",
        purpose=common_pb2.PURPOSE_TRAIN,
        sampling=rollout_pb2.Sampling(
            height=32,
            width=48,
            num_inference_steps=6,
            guidance_scale=1.0,
            num_frames=9,
            embedded_guidance=0.0,
            condition_pixels=4096,
            sampler="dpm_solver_2",
        ),
        groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
        record=common_pb2.RECORD_FINAL,
    )
    request = generation_request(rollout_pb2.GenerateRequest.FromString(sent.SerializeToString()))
    assert request.sampling == Sampling(
        Size(32, 48, 9), 6, Guidance(1.0, 0.0), condition_pixels=4096, sampler="dpm_solver_2"
    )
    assert request.record == "final"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_frames": 1026}, "sampling.num_frames"),
        ({"embedded_guidance": -1.0}, "sampling.embedded_guidance"),
        ({"shift": 0.0}, "sampling.shift"),
        ({"shift": float("nan")}, "sampling.shift"),
        ({"embedded_guidance": float("inf")}, "sampling.embedded_guidance"),
        ({"sampler": "heun"}, "sampling.sampler = 'heun': give one of euler, dpm_solver_2"),
    ],
)
def test_settings_without_sense_are_refused(change: dict[str, Any], named: str) -> None:
    usual: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 6, "guidance_scale": 1.0}
    request = rollout_pb2.GenerateRequest(
        job_id="job",
        purpose=common_pb2.PURPOSE_VALIDATE,
        sampling=rollout_pb2.Sampling(**usual | change),
        groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
    )
    with pytest.raises(ValueError, match=named):
        generation_request(request)


def test_a_reference_kl_needs_training_samples_with_noise() -> None:
    def request(eta: float, *, is_training: bool = True) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            job_id="job",
            purpose=common_pb2.PURPOSE_TRAIN if is_training else common_pb2.PURPOSE_VALIDATE,
            sampling=rollout_pb2.Sampling(height=32, width=32, num_inference_steps=6, guidance_scale=1.0),
            noise=rollout_pb2.Noise(step_type="sde", eta=eta, sde_steps=[1]),
            groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
            record=common_pb2.RECORD_FINAL,
            reference_kl=True,
        )

    assert generation_request(request(0.7)).reference_kl
    for refused in (request(0.0), request(0.7, is_training=False)):
        with pytest.raises(ValueError, match="reference_kl is measured at noisy steps"):
            generation_request(refused)


def test_a_tail_needs_noise_before_it() -> None:
    request = rollout_pb2.GenerateRequest(
        job_id="job",
        purpose=common_pb2.PURPOSE_VALIDATE,
        sampling=rollout_pb2.Sampling(height=32, width=48, num_inference_steps=6, guidance_scale=1.0),
        noise=rollout_pb2.Noise(tail_steps=2),
        groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
    )
    with pytest.raises(ValueError, match=r"noise\.tail_steps = 2 needs sde_steps"):
        generation_request(request)


def test_an_ode_keeps_nothing_of_the_noise() -> None:
    request = generation_request(
        rollout_pb2.GenerateRequest(
            job_id="job",
            purpose=common_pb2.PURPOSE_VALIDATE,
            sampling=rollout_pb2.Sampling(
                height=32, width=32, num_inference_steps=6, guidance_scale=1.0, negative_prompt="unused"
            ),
            noise=rollout_pb2.Noise(step_type="sde", eta=0.0, sde_steps=[1]),
            groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
        )
    )
    assert request.noise == Noise()
    assert request.sampling.negative_prompt == ""
    assert request.record == "none"


@pytest.mark.parametrize("recorded", [[1], [2, 0], [0, 0]])
def test_recorded_steps_are_noisy_ones(recorded: list[int]) -> None:
    request = rollout_pb2.GenerateRequest(
        job_id="job",
        purpose=common_pb2.PURPOSE_TRAIN,
        sampling=rollout_pb2.Sampling(height=32, width=48, num_inference_steps=6, guidance_scale=1.0),
        noise=rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[0, 2], recorded_steps=recorded),
        groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0], seeds=[7])],
    )
    with pytest.raises(ValueError, match=r"noise\.recorded_steps"):
        generation_request(request)


def test_a_preview_keeps_nothing_but_its_picture_whatever_its_noise() -> None:
    for noise in (rollout_pb2.Noise(), rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[1])):
        request = rollout_pb2.GenerateRequest(
            job_id="job",
            purpose=common_pb2.PURPOSE_PREVIEW,
            sampling=rollout_pb2.Sampling(height=32, width=32, num_inference_steps=3, guidance_scale=1.0),
            noise=noise,
            groups=[rollout_pb2.PromptGroup(group=0, prompt="a", indices=[0, 2], seeds=[7, 9])],
        )
        read = generation_request(request)
        assert (read.record, read.sampling.num_steps, read.groups[0].seeds) == ("none", 3, (7, 9))
        assert read.noise.steps == tuple(noise.sde_steps)
