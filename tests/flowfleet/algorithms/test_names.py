"""What a job file may name exists: jobs.py has no torch, so it repeats names that live beside the code."""

from typing import get_args

from flowfleet import jobs
from flowfleet.algorithms.losses import LOSSES
from flowfleet.algorithms.sde import STEPS
from flowfleet.algorithms.windows import WindowStrategy
from flowfleet.models.qwen_image import QwenImageAdapter


def test_every_step_type_and_loss_of_a_job_file_exists() -> None:
    assert set(get_args(jobs.StepType)) <= set(STEPS)
    assert set(get_args(jobs.AlgorithmPart.model_fields["name"].annotation)) <= set(LOSSES)


def test_window_strategies_and_lora_targets_agree() -> None:
    assert get_args(jobs.WindowStrategy) == get_args(WindowStrategy)
    assert QwenImageAdapter.lora_targets == jobs.QWEN_LORA_TARGETS
