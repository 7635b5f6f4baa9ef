"""`local_vlm`: a vision-language model judges in this process, by a rubric, and its score has a gradient by the pixels.

    score = Σ P(a) · v(a) / Σ P(a)    over the answers a of the rubric's scale, at the first token of the answer

which for "yes/no" is P(yes) / (P(yes) + P(no)), as the scorer `vlm` reads it from a server's token probabilities; here
all tokens of the vocabulary count that are such an answer without white space, marks and capitals around them. Takes
Qwen2.5-VL; the rubric is pointwise, and each of its answers is one token. Of a video, the score is the mean over at
most 8 evenly spaced frames. Components: `mass`, the probability of all answers of the scale together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from flowfleet.hardware import devices
from flowfleet.rewards.gradients import PixelInput
from services.reward.judge.media import Picture
from services.reward.judge.messages import filled
from services.reward.judge.rubrics import MEDIA_SLOTS, SOURCE, Rubric, load_rubric
from services.reward.judge.scale import MARKS
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.pixels import gradients_of, leaves_of, mode_of, resized
from services.reward.networks.torch_models import (
    ModelScorer,
    ModelSettings,
    batches,
    image_processor,
    load_model,
    load_tokenizer,
    pick_device,
)
from services.reward.scorer import GradientOutcome, Outcome, Problem, Sample, Score, ScoreGradient, mean_score

IMAGE_TOKEN: Final = "<|image_pad|>"
_SLOT: Final = MEDIA_SLOTS["pointwise"][0]
_PICTURE: Final = Picture.of(b"", "image/png")
"""Stands for the picture among the parts of a question."""


class LocalVlmSettings(ModelSettings):
    """Settings of `local_vlm`."""

    rubric: str
    """Shipped rubric, or a TOML or YAML file: pointwise, of pictures."""


class LocalVlm(ModelScorer[LocalVlmSettings]):
    """Scores one picture after the other: their numbers of tokens differ."""

    name = "local_vlm"
    components = ("mass",)
    gives_gradient = True

    def __init__(self, settings: LocalVlmSettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", ("qwen2_5_vl",))
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=True)
        self._rubric = load_rubric(settings.rubric)
        _check(self._rubric, settings.rubric)
        self.version = f"{settings.version(1).removesuffix(')')}, {self._rubric.digest})"
        self.pinned, self.score_range = settings.pinned, self._rubric.score_range
        super().__init__(settings, num_threads)
        self._judge: _Judge

    def start(self) -> None:
        super().start()
        self._judge = _Judge(self._settings, self._rubric)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [self._score(sample) for sample in samples]

    def score_with_gradient(self, samples: Sequence[PixelInput], params: None) -> list[GradientOutcome]:
        outcomes: list[GradientOutcome] = []
        for part in batches(samples, 1):
            (sample,), (leaf,) = part, leaves_of(part, self._judge.device)
            try:
                score, mass = self._judge(leaf, sample.prompt, sample.metadata)
            except ValueError as error:
                outcomes.append(Problem("rubric", str(error)))
                continue
            (gradient,) = gradients_of(score[None], [leaf])
            outcomes.append(ScoreGradient(float(score.detach()), gradient, {"mass": float(mass.detach())}))
        return outcomes

    def _score(self, sample: Sample) -> Outcome:
        frames = torch.stack([torch.from_numpy(np.array(picture)) for picture in sample.pictures()])
        scores = []
        with torch.no_grad():
            for frame in frames.permute(0, 3, 1, 2).float().div(255).to(self._judge.device):
                try:
                    score, mass = self._judge(frame, sample.prompt, sample.metadata)
                except ValueError as error:
                    return Problem("rubric", str(error))
                scores.append(Score(float(score), {"mass": float(mass)}))
        return mean_score(scores)


class _Judge:
    """The model, and the rubric's answers as tokens."""

    def __init__(self, settings: LocalVlmSettings, rubric: Rubric) -> None:
        folder, setting = settings.processor_folder, settings.processor_setting
        self.device = pick_device(settings.device)
        self._dtype = getattr(torch, settings.dtype)
        self._model = load_model(Qwen2_5_VLForConditionalGeneration, settings, settings.model, "model", self.device)
        self._tokenizer = load_tokenizer(folder, setting)
        self._processor = image_processor(folder, setting)
        self._mode = mode_of(self._processor, setting)
        self._rubric = rubric
        tokens, values = answer_tokens(rubric, self._tokenizer)
        self._tokens, self._values = tokens.to(self.device), values.to(self.device)

    def __call__(self, pixels: Tensor, prompt: str, metadata: Mapping[str, str]) -> tuple[Tensor, Tensor]:
        """Score and mass, 0-d float32, of pixels (3, H, W) from 0 to 1. Raises ValueError where the metadata lack what
        the rubric asks with."""
        patches, grid = self._patches(pixels)
        inputs = self._question(int(grid.prod()) // self._processor.merge_size**2, prompt, metadata)
        with devices.bound(self.device):
            output = self._model(
                **inputs,
                pixel_values=patches.to(self._dtype),
                image_grid_thw=grid[None].to(self.device),
                logits_to_keep=1,
            )
        log_probs = torch.log_softmax(output.logits[0, -1].float(), dim=-1)[self._tokens]
        shares = torch.softmax(log_probs, dim=0)
        return (shares * self._values).sum(), log_probs.exp().sum()

    def _patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Does with gradient what Qwen2-VL's image processor does to a picture. Returns patches (N, 3 · frames ·
        side²), and the grid (frames, rows, columns)."""
        part = self._processor
        side, merge, frames = part.patch_size, part.merge_size, part.temporal_patch_size
        if part.do_resize:
            least, most = part.size["shortest_edge"], part.size["longest_edge"]
            size = smart_resize(*pixels.shape[1:], factor=side * merge, min_pixels=least, max_pixels=most)
            pixels = resized(pixels, size, self._mode)
        if part.do_normalize:
            mean, std = (
                torch.tensor(values).reshape(3, 1, 1).to(pixels) for values in (part.image_mean, part.image_std)
            )
            pixels = (pixels - mean) / std
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        tiles = pixels.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        tiles = tiles.permute(1, 4, 2, 5, 0, 3, 6)  # (rows, columns, within a merged tile, 3, side, side)
        tiles = tiles.unsqueeze(5).expand(*tiles.shape[:5], frames, *tiles.shape[5:])
        return tiles.reshape(rows * columns, 3 * frames * side * side), torch.tensor([1, rows, columns])

    def _question(self, num_tokens: int, prompt: str, metadata: Mapping[str, str]) -> dict[str, Tensor]:
        texts = {"prompt": prompt, **{f"metadata.{name}": value for name, value in metadata.items()}}
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in filled(self._rubric, texts, {_SLOT: [_PICTURE]})
        ]
        system = [{"role": "system", "content": self._rubric.system}] if self._rubric.system else []
        chat = [*system, {"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if text.count(IMAGE_TOKEN) != 1:
            raise ValueError(f"the prompt or its metadata has the text {IMAGE_TOKEN}, which stands for the picture")
        ids = self._tokenizer(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * num_tokens), return_tensors="pt").input_ids
        ids = ids.to(self.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == self._model.config.image_token_id).long(),
        }


def answer_tokens(rubric: Rubric, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """(N,) int64 tokens that are an answer of the rubric's scale, and (N,) float32 their values. Raises ValueError for
    an answer that is not a single token."""
    known = rubric.answers.values
    found = {
        token: known[text]
        for token in range(len(tokenizer))
        if (text := tokenizer.decode([token]).strip().strip(MARKS).strip().lower()) in known
    }
    spoken = {tokenizer.decode([token]).strip().strip(MARKS).strip().lower() for token in found}
    if missing := sorted(known.keys() - spoken):
        raise ValueError(
            f"settings.rubric: the answer {missing[0]!r} of its scale is more than one token of settings.model: change "
            "the scale, or judge with the scorer vlm"
        )
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float32)


def _check(rubric: Rubric, name: str) -> None:
    if rubric.mode != "pointwise" or rubric.judges_text or ("slot", SOURCE) in rubric.pieces:
        raise ValueError(
            f"settings.rubric = {name!r}: this scorer judges one picture at a time; take a pointwise rubric that names "
            "{image} and no other medium, or the scorer vlm"
        )


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> LocalVlm:
    return LocalVlm(LocalVlmSettings.read(settings), num_threads)
