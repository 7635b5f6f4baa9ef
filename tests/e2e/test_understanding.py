"""What a job on pictures does to BAGEL's answers, by real processes: the same questions before and after.

The right answers are those that the untrained model gives, so it scores 1 on each. Full training changes both experts
and loses some; an adapter of the painting expert, merged into the base, keeps them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowfleet.models.registry import sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import PromptMedia
from tests.e2e.conftest import Fleet
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.long

NUM_QUESTIONS = 8
MAX_TOKENS = 4


def test_answers_are_measured_before_and_after_a_job_on_pictures(
    make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("understanding")
    base = make_tiny("bagel", folder / "bagel")
    (folder / "prompts.txt").write_text("a red sign\na blue sign")
    questions = write_questions(folder, base)
    with make_fleet(rewards=("jpeg_compressibility",), model=None) as fleet:
        painted = paint(fleet, base, folder)
    with make_fleet(rewards=("exact_match",), model=None, engine="transformers") as fleet:
        before, after = (ask(fleet, path, questions) for path in (base, painted))
    assert after < before == 1.0


def paint(fleet: Fleet, base: Path, folder: Path) -> Path:
    """The exported folder of a job on pictures."""
    job = fleet.run(
        {
            "name": "paint",
            "model": {"path": str(base), "dtype": "float32"},
            "data": {"train": str(folder / "prompts.txt")},
            "rewards": {"jpeg_compressibility": {}},
            "algorithm": {"name": "flow_grpo"},
            "rollout": {
                "prompts_per_step": 2,
                "group_size": 4,
                "batch_size": 8,
                "height": 32,
                "width": 32,
                "num_inference_steps": 3,
                "window": {"size": 1},
            },
            "trainer": {
                "mode": "full",
                "optimizer": {"lr": 0.05},
                "threads": 1,
            },
            "schedule": {"steps": 2, "save_every": 2},
        }
    )
    return Path(job.results["model"])


def ask(fleet: Fleet, model: Path, questions: Path) -> float:
    """Share of the questions that a model answers as expected."""
    job = fleet.run(
        {
            "name": "ask",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": str(questions), "validation": str(questions)},
            "rewards": {"exact_match": {}},
            "algorithm": {"name": "grpo"},
            "rollout": {"sequence": {"max_tokens": MAX_TOKENS, "validation_temperature": 0.0}},
            "trainer": {"threads": 1, "lora": {"rank": 4, "alpha": 8.0}},
            "schedule": {"steps": 0},
        }
    )
    samples = list(fleet.client.samples(job.id, purpose="validate", step=0))
    assert len(samples) == NUM_QUESTIONS
    return sum(float(sample.reward or 0) for sample in samples) / NUM_QUESTIONS


def write_questions(folder: Path, base: Path) -> Path:
    adapter: SequenceAdapter = sequence_adapter_for(base).load(base, dtype=torch.float32)
    lines = []
    for number in range(NUM_QUESTIONS):
        pixels = np.random.default_rng(number).integers(256, size=(24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        prompt = f"which sign is number {number}"
        answer = greedy(adapter, prompt, PromptMedia("picture", pixels))
        lines.append({"prompt": prompt, "images": [f"{number}.png"], "answer": answer})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "questions.jsonl"


@torch.no_grad()
def greedy(adapter: SequenceAdapter, prompt: str, picture: PromptMedia) -> str:
    question, written = adapter.encode(prompt, [picture]), list[int]()
    for _ in range(MAX_TOKENS):
        inputs = adapter.model_inputs([Tokens(question, torch.tensor([*written, 0]))])
        logits = adapter.transformer(**inputs).logits[0, -1]
        logits[sorted(adapter.undrawn_ids)] = -torch.inf
        written.append(int(logits.argmax()))
        if written[-1] in adapter.stop_ids:
            break
    return adapter.text(torch.tensor(written))
