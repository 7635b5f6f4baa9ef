"""`vlm_heads`: regression heads on a vision-language model, as VideoAlign (arXiv 2501.13918) judges films.

    head k = (w_k · h_k + b_k - mean_k) / std_k,    score = Σ weight_k · head k

h_k is the last hidden state at the k-th of `tokens`, which follow the question, or at the question's end. w, b, mean
and std are tensors `weight` (K, D), `bias`, `mean` and `std` (K,) of the file `heads`; `weight` alone is required.
Takes Qwen2-VL and Qwen2.5-VL. A film is read as such, by at most 8 evenly spaced frames, two of which make a step of
the model's time. Components: the heads, by `names`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from flowfleet.hardware import devices
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.torch_models import (
    ModelScorer,
    ModelSettings,
    image_processor,
    load_model,
    load_tokenizer,
    pick_device,
)
from services.reward.scorer import Outcome, Problem, Sample, Score

PROMPT: Final = "{prompt}"
_PADS: Final = {True: "<|video_pad|>", False: "<|image_pad|>"}
"""The token of a film's parts, and of a picture's."""


class HeadsSettings(ModelSettings):
    """Settings of `vlm_heads`."""

    heads: Path
    """File of the heads' weights, safetensors."""
    names: tuple[str, ...] = Field(min_length=1)
    """The heads' names, in order."""
    weights: dict[str, float] = Field(default={})
    """Weight of each head in the score, 0 where none is given; unset: the score is the heads' mean."""
    question: str = Field(default=PROMPT, min_length=1)
    """Text behind the film; {prompt} stands for the prompt."""
    tokens: tuple[str, ...] = ()
    """Tokens behind the question, a head's each, where it reads; unset: at the question's end."""


class VlmHeads(ModelScorer[HeadsSettings]):
    """Scores one film after the other: their numbers of tokens differ."""

    name = "vlm_heads"

    def __init__(self, settings: HeadsSettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", ("qwen2_vl", "qwen2_5_vl"))
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=True)
        self._heads = _read_heads(settings)
        self.version, self.pinned, self.components = settings.version(1), settings.pinned, settings.names
        super().__init__(settings, num_threads)

    def start(self) -> None:
        super().start()
        settings, folder, setting = self._settings, self._settings.processor_folder, self._settings.processor_setting
        self._device = pick_device(settings.device)
        self._model = load_model(AutoModelForImageTextToText, settings, settings.model, "model", self._device)
        self._tokenizer, self._processor = load_tokenizer(folder, setting), image_processor(folder, setting)
        self._tokens = self._tokenizer.convert_tokens_to_ids(list(settings.tokens))
        if None in self._tokens or self._tokenizer.unk_token_id in self._tokens:
            raise ValueError(f"settings.tokens = {list(settings.tokens)}: the tokenizer does not know all of them")
        self._heads = {name: tensor.to(self._device) for name, tensor in self._heads.items()}

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [self._of(sample) for sample in samples]

    @torch.inference_mode()
    def _of(self, sample: Sample) -> Outcome:
        pictures = sample.pictures()
        if told := next((token for token in self._tokenizer.get_added_vocab() if token in sample.prompt), None):
            return Problem("prompt", f"the prompt contains {told}, which the model reads as a mark: remove it")
        with devices.bound(self._device):
            inputs = {name: tensor.to(self._device) for name, tensor in self._inputs(pictures, sample.prompt).items()}
            hidden = self._model.model(**inputs).last_hidden_state[0].float()
            values = (self._heads["weight"] * hidden[self._places(inputs["input_ids"][0])]).sum(1) + self._heads["bias"]
            found = ((values - self._heads["mean"]) / self._heads["std"]).tolist()
        heads = dict(zip(self._settings.names, found, strict=True))
        weights = self._settings.weights or dict.fromkeys(heads, 1 / len(heads))
        return Score(sum(weight * heads[name] for name, weight in weights.items()), heads)

    def _places(self, ids: Tensor) -> list[int]:
        """Where each head reads."""
        count = len(self._settings.names)
        return [len(ids) - count + head for head in range(count)] if self._tokens else [len(ids) - 1] * count

    def _inputs(self, pictures: Sequence[Image.Image], prompt: str) -> dict[str, Tensor]:
        is_film = len(pictures) > 1
        patches, grid = self._patches(pictures)
        content = [{"type": "video" if is_film else "image"}]
        content.append({"type": "text", "text": self._settings.question.replace(PROMPT, prompt)})
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, _, behind = text.partition(_PADS[is_film] if _PADS[is_film] in text else _PADS[False])
        media = _PADS[is_film] * (int(grid.prod()) // self._processor.merge_size**2)
        ids = self._tokenizer(before + media + behind, return_tensors="pt").input_ids
        ids = torch.cat([ids, torch.tensor([self._tokens], dtype=ids.dtype)], 1) if self._tokens else ids
        pad = self._tokenizer.convert_tokens_to_ids(_PADS[is_film])
        kind = "video" if is_film else "image"
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == pad).long() * (2 if is_film else 1),
            "pixel_values_videos" if is_film else "pixel_values": patches.to(getattr(torch, self._settings.dtype)),
            f"{kind}_grid_thw": grid[None],
        }

    def _patches(self, pictures: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Patches of a picture, or of a film's pairs of frames; and the grid of times, rows and columns. The picture
        processor gives a picture's patches as those of a pair of equal frames, (rows · columns, 3 · 2 · side²)."""
        part, side = self._processor, self._processor.patch_size
        read = [part(images=picture, return_tensors="pt") for picture in pictures]
        rows, columns = read[0]["image_grid_thw"][0].tolist()[1:]
        if len(pictures) == 1:
            return read[0]["pixel_values"], torch.tensor([1, rows, columns])
        frames = [one["pixel_values"].reshape(rows * columns, 3, -1, side * side)[:, :, 0] for one in read]
        frames += frames[-1:] * (-len(frames) % part.temporal_patch_size)
        whole = torch.stack(frames).reshape(-1, part.temporal_patch_size, rows * columns, 3, side * side)
        return whole.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1), torch.tensor([len(whole), rows, columns])


def _read_heads(settings: HeadsSettings) -> dict[str, Tensor]:
    """The file's tensors in float32, those that it leaves out included. ValueError for others than said."""
    where = f"settings.heads = {str(settings.heads)!r}"
    try:
        stored = load_file(settings.heads)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    count = len(settings.names)
    if "weight" not in stored or stored["weight"].ndim != 2 or len(stored["weight"]) != count:
        raise ValueError(f"{where}: it needs a tensor weight ({count}, width), a row for each of settings.names")
    if unknown := settings.weights.keys() - set(settings.names):
        raise ValueError(f"settings.weights: {sorted(unknown)[0]!r} is none of settings.names")
    if settings.tokens and len(settings.tokens) != count:
        raise ValueError(f"settings.tokens: give one for each of the {count} heads, or none")
    usual = {"bias": np.zeros(count), "mean": np.zeros(count), "std": np.ones(count)}
    made = {name: torch.from_numpy(values) for name, values in usual.items()} | stored
    return {name: made[name].float() for name in ("weight", *usual)}


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> VlmHeads:
    return VlmHeads(HeadsSettings.read(settings), num_threads)
