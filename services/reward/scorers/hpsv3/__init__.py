"""`hpsv3`: human preference for a picture and its prompt, by HPSv3 (a Qwen2-VL-7B with a reward head).

The score is μ, the first number that the library's inferencer gives, without bounds. The library itself builds the
model from a folder, then reads the checkpoint; nothing is downloaded or unpickled. It computes in bfloat16 on GPUs and
in float32 on CPUs. The score of a video is the mean over at most 8 frames.
"""

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from PIL import Image
from pydantic import Field

from flowfleet.hardware import devices
from services.reward.networks.checkpoints import check_checkpoint, fingerprint
from services.reward.networks.libraries import library, of_samples
from services.reward.networks.torch_models import ModelScorer, batches, pick_device
from services.reward.scorer import Outcome, Problem, Sample, Score, ScorerSettings

MAX_ASPECT = 200
"""Longer pictures are refused by the library."""


class HPSv3Settings(ScorerSettings):
    """`weights` and `model` are required."""

    weights: Path
    """The checkpoint, HPSv3.safetensors."""
    model: Path
    """Folder of Qwen2-VL-7B-Instruct with its weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": the first GPU, else the CPU."""
    batch_size: int = Field(default=8, ge=1)
    """Pictures per forward pass."""


class HPSv3Scorer(ModelScorer[HPSv3Settings]):
    """Component `log_sigma`: logarithm of the standard deviation that the model gives its score."""

    name = "hpsv3"
    components = ("log_sigma",)

    def __init__(self, settings: HPSv3Settings, num_threads: int) -> None:
        if settings.weights.suffix != ".safetensors" or not settings.weights.is_file():
            raise ValueError(f"settings.weights = {str(settings.weights)!r}: name the file HPSv3.safetensors")
        check_checkpoint(settings.model, "model", ("qwen2_vl",))
        _library()
        self.version = f"1 (hpsv3 {version('hpsv3')} {fingerprint(settings.weights, settings.model)})"
        super().__init__(settings, num_threads)
        self._inferencer: Any = None
        self._special: tuple[str, ...] = ()
        self._device: torch.device

    def start(self) -> None:
        super().start()
        self._device = pick_device(self._settings.device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"settings.device: hpsv3 does not run on {self._device.type}: set it to cpu")
        try:
            self._inferencer = self._load()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            weights, model = str(self._settings.weights), str(self._settings.model)
            names = f"settings.weights = {weights!r} and settings.model = {model!r}"
            raise ValueError(f"{names} cannot be loaded: {reason}") from error
        self._special = tuple(self._inferencer.processor.tokenizer.get_added_vocab())

    def _load(self) -> Any:
        """The library's inferencer, by its own configuration with our folder and the device's data type."""
        code = _library()
        options = yaml.safe_load((Path(code.__file__).parent / "config/HPSv3_7B.yaml").read_text())
        on_cpu = self._device.type == "cpu"
        options |= {"model_name_or_path": str(self._settings.model), "bf16": not on_cpu, "use_cpu": on_cpu}
        options["torch_dtype"] = "float32" if on_cpu else "bfloat16"
        with tempfile.TemporaryDirectory() as aside, contextlib.redirect_stdout(io.StringIO()):
            config = Path(aside, "hpsv3.yaml")
            config.write_text(yaml.safe_dump(options))
            return code.HPSv3RewardInferencer(str(config), str(self._settings.weights), device=str(self._device))

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        pictures = [sample.pictures() for sample in samples]
        pairs = [(one, sample.prompt) for some, sample in zip(pictures, samples, strict=True) for one in some]
        found: list[Outcome | None] = [self._problem(*pair) for pair in pairs]
        places = [place for place, problem in enumerate(found) if problem is None]
        for part in batches(places, self._settings.batch_size):
            for place, score in zip(part, self._run([pairs[place] for place in part]), strict=True):
                found[place] = score
        return of_samples([one for one in found if one is not None], [len(some) for some in pictures])

    def _problem(self, picture: Image.Image, prompt: str) -> Problem | None:
        """A prompt with a special token would move the rewards of a whole batch to other samples."""
        if told := next((token for token in self._special if token in prompt), None):
            return Problem("prompt", f"the prompt contains {told}, which the model reads as a mark: remove it")
        if max(picture.size) > MAX_ASPECT * min(picture.size):
            return Problem("picture", f"one side is more than {MAX_ASPECT} times the other: crop the picture")
        return None

    @torch.inference_mode()
    def _run(self, pairs: Sequence[tuple[Image.Image, str]]) -> list[Score]:
        pictures, prompts = zip(*pairs, strict=True)
        with devices.bound(self._device):
            rows = self._inferencer.reward(list(pictures), list(prompts)).float().cpu().tolist()
        return [Score(value, {"log_sigma": log_sigma}) for value, log_sigma in rows]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> HPSv3Scorer:
    return HPSv3Scorer(HPSv3Settings.read(settings), num_threads)


def _library() -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it lacks
        return library("hpsv3.inference", "hpsv3")
