"""Qwen3-Omni's Thinker in vLLM: its own model class, with prompts whose media our processor has prepared.

vLLM's processor for it needs torchvision, and would prepare media a second time, unlike the trainer. So prompts come
here as tokens and the model's inputs, which are cut into vLLM's items: one a picture, sound or film.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import BatchFeature, PretrainedConfig, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths
from vllm.inputs import mm_input, tokens_input
from vllm.model_executor.models.qwen2_5_omni_thinker import create_qwen2_5_omni_thinker_field_factory
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration as Thinker,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from flowfleet.models.sequences.prompts import EncodedPrompt

ARCHITECTURE: Final = "FlowfleetQwen3OmniThinker"
"""Name of the model class in vLLM's registry."""
_RENAMES: Final = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "visual.": "model.visual.",
    "audio_tower.": "model.audio_tower.",
}
_FLAT_RENAMES: Final = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""The same for a transformers whose Thinker holds the encoders next to the language model, such as 5.17."""


def renames(thinker: nn.Module) -> Mapping[str, str]:
    """Beginnings of parameters' names here, and in transformers' Thinker."""
    return _RENAMES if hasattr(thinker.model, "language_model") else _FLAT_RENAMES


class _Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "audio": None, "video": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """An item may fill the whole prompt."""
        return dict.fromkeys(mm_counts, seq_len)


class _Dummies(BaseDummyInputsBuilder[_Info]):
    """Not asked for, because vLLM starts without a profile of the encoders."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        raise NotImplementedError


class _Processor(BaseMultiModalProcessor[_Info]):
    """Not asked, because prompts come prepared."""

    def _get_mm_fields_config(self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        raise NotImplementedError


@MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummies)
class PreparedThinker(Thinker):
    """vLLM's Thinker under a processor that prepares nothing."""


def register() -> None:
    """Makes the class known to vLLM by `ARCHITECTURE`."""
    ModelRegistry.register_model(ARCHITECTURE, PreparedThinker)


def configured(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a Thinker, or of a whole Qwen3-Omni, as vLLM's model reads it. transformers leaves out four
    fields: its grid of positions is square and always added, its output layer is a layer of its own, and its rotary
    positions are interleaved."""
    thinker = getattr(config, "thinker_config", config)
    whole = Qwen3OmniMoeConfig(thinker_config=thinker.to_dict())
    whole.architectures = [ARCHITECTURE]
    vision = whole.thinker_config.vision_config
    vision.image_size = math.isqrt(vision.num_position_embeddings) * vision.patch_size
    vision.apply_vit_abs_pos_embed = True
    text = whole.thinker_config.text_config
    text.tie_word_embeddings = getattr(text, "tie_word_embeddings", False)
    text.rope_parameters = {**text.rope_parameters, "mrope_interleaved": True}
    return whole


def prompt_of(prompt: EncodedPrompt, config: Any) -> Any:
    """A prompt as vLLM takes it; `config` is the Thinker's configuration."""
    ids = prompt.token_ids.tolist()
    if not prompt.inputs:
        return tokens_input(ids)
    merge = config.vision_config.spatial_merge_size
    fields = create_qwen2_5_omni_thinker_field_factory(merge)
    inputs, counts = _inputs(prompt.inputs, merge)
    kwargs = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields(inputs))
    tokens = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}
    places = {kind: _places(prompt.token_ids, tokens[kind], numbers) for kind, numbers in counts.items()}
    hashes = {kind: [_hash(item.get_data()) for item in kwargs[kind]] for kind in counts}
    return mm_input(ids, kwargs, hashes, places)


def _inputs(given: Mapping[str, Tensor], merge: int) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The inputs by vLLM's names, and the numbers of tokens of each item by kind."""
    inputs: dict[str, Any] = {}
    counts: dict[str, list[int]] = {}
    for kind, name, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if name in given:
            inputs |= {name: given[name], grid: given[grid]}
            counts[kind] = [int(count) // merge**2 for count in given[grid].prod(-1).tolist()]
    if "video" in counts:
        inputs["second_per_grid_ts"] = given["video_second_per_grid"]
        inputs["use_audio_in_video"] = torch.tensor(False)
    if "input_features" in given:
        mask = given["feature_attention_mask"]
        inputs["input_audio_features"] = given["input_features"].permute(0, 2, 1)[mask.bool()].permute(1, 0)
        inputs |= {"feature_attention_mask": mask, "audio_feature_lengths": mask.sum(-1)}
        counts["audio"] = [int(count) for count in _get_feat_extract_output_lengths(mask.sum(-1)).tolist()]
    return inputs, counts


def _places(token_ids: Tensor, token: int, counts: Sequence[int]) -> list[PlaceholderRange]:
    """Where each item's tokens stand, from the token before them, which begins the item, to the one behind.

    vLLM numbers positions from that token on. Its own processor gives the next one, so that positions of pictures and
    films are one off from transformers'.
    """
    offsets = torch.where(token_ids == token)[0].tolist()
    ranges, start = [], 0
    for count in counts:
        is_embed = torch.ones(count + 2, dtype=torch.bool)
        is_embed[0] = is_embed[-1] = False
        ranges.append(PlaceholderRange(offset=offsets[start] - 1, length=count + 2, is_embed=is_embed))
        start += count
    return ranges


def _hash(data: Mapping[str, Any]) -> str:
    """Names an item by its content: equal items share what vLLM keeps of them."""
    made = hashlib.sha256()
    for name in sorted(data):
        value = torch.as_tensor(data[name]).contiguous()
        made.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        made.update(value.view(torch.uint8).numpy().tobytes() if value.dim() else str(value.item()).encode())
    return made.hexdigest()
