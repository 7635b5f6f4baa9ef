"""Qwen3: text models, dense and as mixtures of experts."""

from typing import ClassVar

from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from flowfleet.models.sequences.adapter import SequenceAdapter


class Qwen3Adapter(SequenceAdapter):
    """Dense models, such as Qwen3-8B."""

    model_class = Qwen3ForCausalLM
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )


class Qwen3MoeAdapter(SequenceAdapter):
    """Mixtures of experts, such as Qwen3-30B-A3B. The default adapter leaves the experts as they are: their weights are
    one tensor a layer."""

    model_class = Qwen3MoeForCausalLM
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
