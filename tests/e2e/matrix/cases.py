"""Models × algorithms: the cases that choice.py chooses, their jobs, and what each must have done."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.media.files import encode_media
from flowfleet.models.registry import family_of
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.matrix.choice import cases_on, least_settings

SIZE = 32
NUM_PROMPTS = 2
GROUP_SIZE = 4
NUM_STEPS = 2
NUM_FRAMES = 9
MAX_TOKENS = 24
QUESTIONS = ("which color is the square ?", "what is in the film ?")
FROM_TEXT = (
    *("qwen_image", "stable_diffusion_3", "flux", "chroma", "z_image", "bagel", "hunyuan_image3"),
    *("sana", "krea2", "qwen_image_21"),
)
EDITS_AND_VIDEOS = (
    *("qwen_image_edit", "flux2_klein", "flux_kontext"),
    *("wan", "wan_two_experts", "wan_5b", "wan_image"),
    *("hunyuan_video_15", "hunyuan_video_15_image", "ltx2"),
)
"""One checkpoint a family, and Wan with two experts and from an image as well; the trainer's and the rollout's tests
meet every kind."""

TEXTS = ("qwen3", "qwen3_moe", "thinker", "qwen3_omni", "bagel")
"""Checkpoints of models that write text; BAGEL is one of FROM_TEXT as well."""

PIPELINES = {
    "qwen_image": "QwenImagePipeline",
    "stable_diffusion_3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "chroma": "ChromaPipeline",
    "z_image": "ZImagePipeline",
    "sana": "SanaPipeline",
    "krea2": "Krea2Pipeline",
    "qwen_image_21": "QwenImage21Pipeline",
    "qwen_image_edit": "QwenImageEditPlusPipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "flux_kontext": "FluxKontextPipeline",
    "bagel": "BagelForConditionalGeneration",
    "hunyuan_image3": "HunyuanImage3ForCausalMM",
    "wan": "WanPipeline",
    "wan_two_experts": "WanPipeline",
    "wan_5b": "WanPipeline",
    "wan_image": "WanImageToVideoPipeline",
    "hunyuan_video_15": "HunyuanVideo15Pipeline",
    "hunyuan_video_15_image": "HunyuanVideo15ImageToVideoPipeline",
    "ltx2": "LTX2Pipeline",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_omni": "Qwen3OmniMoeForConditionalGeneration",
}
"""Kind of checkpoint to its family."""

Case = tuple[str, str, str]
"""Kind of checkpoint, algorithm, trainer mode."""


THROUGH_SERVICES: tuple[Case, ...] = (
    ("stable_diffusion_3", "flow_grpo", "full"),
    ("wan", "awm", "full"),
    ("flux", "srpo", "full"),
    ("qwen3", "grpo", "lora"),
)
"""A pair of each kind of loss: policy, matching, gradient, sequence. They run as processes, in test_services.py."""

ROUNDING = 1e-6
"""A rollout decodes token by token, and a trainer reads packed sequences: float32 sums may end a bit or two apart."""

LETTERS = """
def letters(text, prompt, metadata):
    return sum(map(ord, text)) % 10 / 10
"""
"""File of a reward for texts."""


def cases(kinds: tuple[str, ...]) -> list[Case]:
    """The cases of these checkpoints that run in one process."""
    made = [case for kind in kinds for case in every_case(kind, writes=kinds == TEXTS)]
    return [case for case in made if case not in THROUGH_SERVICES]


def every_case(kind: str, *, writes: bool) -> list[Case]:
    """The cases of choice.py for a checkpoint."""
    return [(kind, case.algorithm, case.mode) for case in cases_on(kind, PIPELINES[kind], writes=writes)]


def write_data(folder: Path) -> None:
    """Prompt files of every form: with and without condition images, and preferences over pictures and videos."""
    random = np.random.default_rng(1)
    for number in range(NUM_PROMPTS):
        Image.fromarray(random.integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        for name, num_frames in (("image", 1), ("video", NUM_FRAMES)):
            for verdict in ("chosen", "rejected"):
                frames = random.integers(256, size=(num_frames, SIZE, SIZE, 3), dtype=np.uint8)
                suffix = ".png" if num_frames == 1 else ".mp4"
                (folder / f"{name}-{verdict}-{number}{suffix}").write_bytes(encode_media(frames, fps=8)[0])
    for is_video, has_images, is_pairs in product((False, True), repeat=3):
        lines = [_line(number, is_video, has_images, is_pairs) for number in range(NUM_PROMPTS)]
        (folder / _data_name(is_video, has_images, is_pairs)).write_text("\n".join(map(json.dumps, lines)))


def _data_name(is_video: bool, has_images: bool, is_pairs: bool) -> str:
    return f"{int(is_video)}{int(has_images)}{int(is_pairs)}.jsonl"


def _line(number: int, is_video: bool, has_images: bool, is_pairs: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt": f"A red ball number {number} moving left"}
    if has_images:
        line["images"] = [f"{number}.png"]
    if is_pairs:
        name, suffix = ("video", ".mp4") if is_video else ("image", ".png")
        line |= {verdict: f"{name}-{verdict}-{number}{suffix}" for verdict in ("chosen", "rejected")}
    return line


SAMPLERS: dict[str, dict[str, Any]] = {
    "mix_grpo": {"tail_steps": 1},
    "diffusion_nft": {"sampler": "dpm_solver_2"},
    "diffusion_opd": {"window": {"high": 1}},
}
"""The authors' way to sample (MixGRPO-Flash): log-probs must stay exact. Later steps of three are too coarse for noise
in schedules that end above 0."""


def make_job(checkpoint: Path, data: Path, algorithm: str, mode: str) -> dict[str, Any]:
    family = family_of(checkpoint)
    is_video, is_pairs = family.modality == "video", ALGORITHMS[algorithm].data == "preferences"
    begins = family.holds_first_frame and checkpoint.name == "wan_5b"
    has_images = begins or (family.takes_images > 0 and not family.holds_first_frame)
    job: dict[str, Any] = {
        "name": f"{checkpoint.name}-{algorithm}".replace("_", "-"),
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "data": {"train": str(data / _data_name(is_video, has_images, is_pairs))},
        "rewards": {} if is_pairs else {reward_for(algorithm): {}},
        "algorithm": {"name": algorithm},
        "rollout": {
            "prompts_per_step": NUM_PROMPTS,
            "height": SIZE,
            "width": SIZE,
            "num_frames": NUM_FRAMES if is_video else 1,
            "num_inference_steps": 3,
            "batch_size": NUM_PROMPTS * GROUP_SIZE,
            "window": {"size": 1},
            **SAMPLERS.get(algorithm, {}),
        },
        "trainer": {
            "mode": mode,
            "lora": {"rank": 4, "alpha": 8.0},
            "micro_batch_size": NUM_PROMPTS * GROUP_SIZE,
            "deterministic": True,
            "threads": 1,
        },
        "schedule": {"steps": NUM_STEPS, "save_every": NUM_STEPS},
    }
    if family.max_sequence_length is not None:
        job["model"]["max_sequence_length"] = MAX_TOKENS
    if not is_pairs:
        job["rollout"]["group_size"] = GROUP_SIZE
    if has_images and not is_video:
        job["rollout"]["condition_pixels"] = SIZE * SIZE
    if begins:
        job["rollout"]["from_image"] = True
    return job


def reward_for(algorithm: str) -> str:
    """A service that the algorithm can train on."""
    return "image_quality" if LOSSES[ALGORITHMS[algorithm].loss].kind == "gradient" else "jpeg_compressibility"


def make_text_job(checkpoint: Path, data: Path, algorithm: str, mode: str) -> dict[str, Any]:
    """A job of two steps, with a picture in each question where the model takes some."""
    questions = write_questions(data, has_images=checkpoint.name in ("thinker", "qwen3_omni", "bagel"))
    return {
        "name": f"{checkpoint.name}-{algorithm}".replace("_", "-"),
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "data": {"train": str(questions)},
        "rewards": {"letters": {}},
        "algorithm": {"name": algorithm},
        "rollout": {
            "prompts_per_step": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "batch_size": NUM_PROMPTS * GROUP_SIZE,
            "sequence": {"max_tokens": 6},
        },
        "trainer": {"mode": mode, "lora": {"rank": 4, "alpha": 8.0}, "deterministic": True, "threads": 1},
        "schedule": {"steps": NUM_STEPS, "save_every": NUM_STEPS},
    }


def write_questions(data: Path, *, has_images: bool) -> Path:
    """A file of questions, of words that every tokenizer here knows."""
    lines: list[dict[str, Any]] = [{"prompt": question} for question in QUESTIONS]
    if has_images:
        lines = [line | {"images": [f"{number}.png"]} for number, line in enumerate(lines)]
    file = data / f"questions-{int(has_images)}.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def check(fleet: Fleet, checkpoint: Path, data: Path, algorithm: str, mode: str, *, tolerance: float = 0.0) -> None:
    """Runs the job of a case: every sample is accounted for, numbers are finite, log-probs exact, or ratios of them
    within `tolerance` of 1."""
    method = ALGORITHMS[algorithm]
    make = make_text_job if LOSSES[method.loss].traits.writes_tokens else make_job
    settings = make(checkpoint, data, algorithm, mode)
    if not LOSSES[method.loss].traits.reads_rewards:
        teacher = fleet.run(make_job(checkpoint, data, "flow_grpo", mode))
        settings["algorithm"] |= least_settings(method, f"job:{teacher.id}")
        settings["rewards"] = {}
    job = fleet.run(settings)
    asked = NUM_STEPS * NUM_PROMPTS * (2 if method.data == "preferences" else GROUP_SIZE)
    assert_accounted(job, asked)
    rows = [row.values for row in fleet.metrics(job)]
    assert len(rows) == NUM_STEPS, f"{len(rows)} steps"
    for row in rows:
        assert all(value is None or math.isfinite(value) for value in row.values()), row
        if LOSSES[method.loss].kind in ("policy", "sequence"):
            ratios = row["rollout_corr/ratio_min"], row["rollout_corr/ratio_max"]
            assert all(ratio is not None and abs(ratio - 1) <= tolerance for ratio in ratios), row
    assert any((row["actor/grad_norm"] or 0) > 0 for row in rows), "no gradient in any step"
    assert Path(job.results["model"]).is_dir()
