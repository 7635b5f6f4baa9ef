"""Qwen3-Omni's Thinker: text from text, pictures, sounds and films."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from flowfleet.models.sequences.adapter import MediaAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.models.sequences.question_media import QuestionProcessor

_FEATURES: Final = "input_features"
_FEATURE_MASK: Final = "feature_attention_mask"
_SECONDS: Final = "video_second_per_grid"
"""Only positions depend on it."""


class Qwen3OmniThinkerAdapter(MediaAdapter):
    """A Thinker, or the Thinker of a whole Qwen3-Omni. The default adapter leaves the experts and the encoders of
    pictures and sounds as they are."""

    model_class = Qwen3OmniMoeThinkerForConditionalGeneration

    def __init__(self, model: Any, processor: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, processor, dtype=dtype, device=device)
        if model is not None:
            model.lora_excluded = r"(.*\.)?(audio_tower|visual)\..*"
            text = getattr(model.model, "language_model", model.model)
            blocks = {type(layer).__name__ for layer in text.layers}  # transformers before 5.15 leave them out
            model._no_split_modules = {*(model._no_split_modules or ()), *blocks}

    @classmethod
    def load_processor(cls, path: str | Path) -> QuestionProcessor:
        return QuestionProcessor.load(path)

    @property
    def undrawn_ids(self) -> frozenset[int]:
        """A written one would have no picture, sound or film."""
        config = self.transformer.config
        return frozenset((config.image_token_id, config.audio_token_id, config.video_token_id))

    def model_inputs(self, sequences: Sequence[Tokens]) -> dict[str, Any]:
        """Positions are (4, 1, N): in the text, which separate the sequences, then in time, height and width."""
        inputs = super().model_inputs(sequences)
        rotary = torch.cat([self._rotary(item) for item in sequences], dim=1)
        text = inputs["position_ids"].float()
        inputs["position_ids"] = torch.cat([text[None], rotary[:, None].to(self.device)])
        return inputs | self._media([item.prompt for item in sequences])

    def next_positions(self, position_ids: Tensor) -> Tensor:
        text, rotary = position_ids[:1].amax(), position_ids[1:].amax()
        return torch.stack([text, rotary, rotary, rotary])[:, None] + 1

    def hidden_states(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        if hasattr(model.model, "language_model"):
            return super().hidden_states(model, inputs)
        head, model.lm_head = model.lm_head, nn.Identity()  # Before transformers 5.21 only the whole model takes media.
        try:
            hidden: Tensor = model.forward(**inputs, use_cache=False).logits
        finally:
            model.lm_head = head
        return hidden

    def _rotary(self, item: Tokens) -> Tensor:
        """(3, P + T - 1) float32 on the CPU."""
        prompt, inputs = item.prompt.token_ids, item.prompt.inputs
        lengths = inputs[_FEATURE_MASK].sum(-1) if _FEATURE_MASK in inputs else None
        indices, _ = self.transformer.get_rope_index(
            prompt[None],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(prompt)[None],
            False,
            lengths,
            inputs.get(_SECONDS),
        )
        places: Tensor = indices[:, 0].float()
        written = places.max() + 1 + torch.arange(len(item.token_ids) - 1)
        return torch.cat([places, written.expand(3, -1)], dim=1)

    def _media(self, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
        """The media of all prompts, one after the other; sounds are padded to the longest."""
        names = dict.fromkeys(name for prompt in prompts for name in prompt.inputs if name != _SECONDS)
        inputs = {}
        for name in names:
            parts = [prompt.inputs[name] for prompt in prompts if name in prompt.inputs]
            if name in (_FEATURES, _FEATURE_MASK):
                longest = max(part.shape[-1] for part in parts)
                parts = [F.pad(part, (0, longest - part.shape[-1])) for part in parts]
            value = torch.cat(parts).to(self.device)
            inputs[name] = value.to(self.dtype) if value.is_floating_point() else value
        return inputs
