"""Questions with pictures, sounds and films: what a checkpoint's processors make of them, as inputs of its Thinker.

transformers' own `Qwen3OmniMoeProcessor` cannot be made without torchvision, of which it needs the films alone. This
one uses the parts that Pillow and NumPy suffice for, so that every machine makes the same numbers; a film goes through
the picture processor frame by frame, and two frames share a patch as in transformers' video processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

from flowfleet.models.sequences.prompts import EncodedPrompt, PromptMedia

SOUND_RATE: Final = 16_000
"""Samples of a sound per second."""
FILM_RATE: Final = 2.0
"""Frames of a film per second that the model sees."""
MAX_FRAMES: Final = 768
_FILM_SIZE: Final = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""Pixels of a film's frame where the checkpoint does not say."""
_KINDS: Final = {"picture": "image", "sound": "audio", "film": "video"}
"""Names of the parts of a message in chat templates."""


@dataclass(frozen=True)
class Placeholders:
    """Tokens that stand for media, by the checkpoint's configuration."""

    picture: int
    sound: int
    film: int
    window: int
    """`n_window` of the sound's encoder."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Placeholders:
        """Reads the configuration of a Thinker, or of a whole model. Raises KeyError where it lacks a token."""
        thinker = config.get("thinker_config", config)
        window = thinker["audio_config"].get("n_window", 50)
        return cls(thinker["image_token_id"], thinker["audio_token_id"], thinker["video_token_id"], window)


class QuestionProcessor:
    """Texts and media to tokens and inputs."""

    def __init__(
        self, tokenizer: Any, pictures: Any, sounds: Any, placeholders: Placeholders, film_size: Mapping[str, int]
    ) -> None:
        self.tokenizer = tokenizer
        self._pictures, self._sounds = pictures, sounds
        self._placeholders, self._film_size = placeholders, dict(film_size)

    @classmethod
    def load(cls, path: str | Path) -> QuestionProcessor:
        """Reads the tokenizer and the processors of a folder. Raises OSError or ValueError where one is missing."""
        folder = Path(path)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if tokenizer.chat_template is None and (file := folder / "chat_template.json").is_file():
            tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        picture_class: Any = Qwen2VLImageProcessorPil
        sound_class: Any = WhisperFeatureExtractor
        film = folder / "video_preprocessor_config.json"
        size = json.loads(film.read_text(encoding="utf-8")).get("size") if film.is_file() else None
        return cls(
            tokenizer,
            picture_class.from_pretrained(str(folder), local_files_only=True),
            sound_class.from_pretrained(str(folder), local_files_only=True),
            Placeholders.of(json.loads((folder / "config.json").read_text(encoding="utf-8"))),
            size or _FILM_SIZE,
        )

    def encode(self, prompt: str, media: Sequence[PromptMedia]) -> EncodedPrompt:
        """A question in the chat template, its media first, in their order. Raises ValueError for a text that holds
        placeholders of its own, and for media that the model cannot take."""
        parts: list[dict[str, str]] = [{"type": _KINDS[medium.kind]} for medium in media]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs, counts = self._inputs(media)
        return EncodedPrompt(torch.tensor(self._expanded(token_ids, counts), dtype=torch.int64), inputs)

    def _inputs(self, media: Sequence[PromptMedia]) -> tuple[dict[str, Tensor], dict[int, list[int]]]:
        """The model's inputs, and the numbers of tokens of each medium by its placeholder."""
        of_kind = {kind: [medium for medium in media if medium.kind == kind] for kind in _KINDS}
        inputs: dict[str, Tensor] = {}
        counts: dict[int, list[int]] = {self._placeholders.picture: [], self._placeholders.film: []}
        if of_kind["picture"]:
            patches, grid = self._patches([medium.content for medium in of_kind["picture"]], None)
            inputs |= {"pixel_values": patches, "image_grid_thw": grid}
            counts[self._placeholders.picture] = self._num_tokens(grid)
        if of_kind["film"]:
            films = [self._film(medium) for medium in of_kind["film"]]
            grid = torch.cat([grid for _, grid in films])
            seconds = torch.full((len(films),), self._pictures.temporal_patch_size / FILM_RATE)
            inputs |= {"pixel_values_videos": torch.cat([patches for patches, _ in films]), "video_grid_thw": grid}
            inputs["video_second_per_grid"] = seconds
            counts[self._placeholders.film] = self._num_tokens(grid)
        counts[self._placeholders.sound] = []
        if of_kind["sound"]:
            features, mask = self._features([medium.content for medium in of_kind["sound"]])
            inputs |= {"input_features": features, "feature_attention_mask": mask}
            lengths = mask.sum(-1).tolist()
            tokens = [_get_feat_extract_output_lengths(length, self._placeholders.window) for length in lengths]
            counts[self._placeholders.sound] = [int(count) for count in tokens]
        return inputs, counts

    def _patches(self, pictures: Sequence[np.ndarray], size: Mapping[str, int] | None) -> tuple[Tensor, Tensor]:
        more = {"size": dict(size)} if size else {}
        outputs = self._pictures(images=list(pictures), return_tensors="pt", input_data_format="channels_last", **more)
        return outputs["pixel_values"], outputs["image_grid_thw"]

    def _film(self, film: PromptMedia) -> tuple[Tensor, Tensor]:
        """(frames / 2 · patches, numbers of a patch) and (1, 3)."""
        depth = int(self._pictures.temporal_patch_size)
        frames = film.content[frames_shown(len(film.content), film.rate, depth)]
        patches, grid = self._patches(list(frames), self._film_size)
        side = int(self._pictures.patch_size) ** 2
        by_frame = patches.view(len(frames) // depth, depth, -1, 3, depth, side)
        joined = torch.stack([by_frame[:, frame, :, :, frame] for frame in range(depth)], dim=3)
        return joined.reshape(-1, 3 * depth * side), torch.tensor([[len(frames) // depth, *grid[0, 1:].tolist()]])

    def _features(self, sounds: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        outputs = self._sounds(
            list(sounds),
            sampling_rate=SOUND_RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return outputs["input_features"], outputs["attention_mask"]

    def _num_tokens(self, grid: Tensor) -> list[int]:
        return [int(count) for count in (grid.prod(-1) // self._pictures.merge_size**2).tolist()]

    def _expanded(self, token_ids: Sequence[int], counts: Mapping[int, list[int]]) -> list[int]:
        """Each placeholder as often as its medium has tokens."""
        for token, numbers in counts.items():
            if token_ids.count(token) != len(numbers):
                name = self.tokenizer.convert_ids_to_tokens(token)
                raise ValueError(f"prompts must not contain {name}: media are put in by the model")
        left = {token: iter(numbers) for token, numbers in counts.items()}
        return [token for mark in token_ids for token in ([mark] * next(left[mark]) if mark in left else [mark])]


def frames_shown(count: int, rate: float, multiple: int) -> list[int]:
    """Places of the frames of a film that are shown: `FILM_RATE` a second, evenly spaced, in a multiple of `multiple`,
    the last one again where there are too few."""
    wanted = count if rate <= 0 else round(count / rate * FILM_RATE)
    wanted = min(max(wanted, multiple), MAX_FRAMES)
    places: list[int] = np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()
    return places + [places[-1]] * (-len(places) % multiple)
