"""`SequenceAdapter`, the interface of a model family that writes text, for sampling and training.

`ModelAdapter` (base.py) is the same for flows. Rollout engines encode prompts with it. The trainer computes the
log-probs of the written sequences with `log_probs`, which the transformers engine calls as well. Several sequences go
forward as one row without padding: positions start over with each, and none sees another. The model keeps its usual
forward for drawing tokens.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flowfleet.hardware import staging
from flowfleet.models.empty import empty_model
from flowfleet.models.loading import Component, LoadFormat, fill_dummy
from flowfleet.models.sequences.attention import PackedAttention
from flowfleet.models.sequences.prompts import EncodedPrompt, PromptMedia
from flowfleet.models.sequences.routing import Routing
from flowfleet.models.sequences.token_log_probs import token_log_probs
from flowfleet.models.weight_files import TRANSFORMERS, Layout, weight_files

MODEL: Final = "model"
"""Name of the one component that is trained and published."""
PARTS: Final[tuple[Component, ...]] = ("transformer", "text_encoder")
"""The model, and what turns prompts into its inputs."""


@dataclass(frozen=True)
class Tokens:
    """A prompt and what was written after it."""

    prompt: EncodedPrompt
    token_ids: Tensor
    """(T,) int64, T at least 1."""
    routed_experts: Tensor | None = None
    """(P + T - 1, layers, top_k): experts of each input token, to be taken again; None: the model chooses."""

    @property
    def num_inputs(self) -> int:
        """P + T - 1: the last token is only predicted."""
        return len(self.prompt.token_ids) + len(self.token_ids) - 1


class SequenceAdapter(ABC):
    """A family of transformers models that write text. Make it with `load`.

    A family gives `model_class` and `lora_targets`, and overrides what differs from a plain causal language model.
    """

    model_class: ClassVar[Any]
    """transformers' model class."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module names that a LoRA adapts by default, as PEFT's `target_modules`."""

    layout: ClassVar[Layout] = TRANSFORMERS
    """Where a checkpoint holds the model's weights."""
    max_sequence_length: ClassVar[None] = None
    """Prompts keep their own length; `rollout.sequence.max_prompt_tokens` limits it."""

    dtype: torch.dtype
    device: torch.device

    def __init__(self, model: Any, processor: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        """Takes a `model_class` and a tokenizer or processor, either of which may be None; use `load`."""
        self.transformer, self.processor = model, processor
        self.dtype, self.device = dtype, device
        self.routing = Routing(model)
        self.attention = PackedAttention(model)
        if model is not None:
            _extend_forward(model, self)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        components: tuple[Component, ...] = PARTS,
        load_format: LoadFormat = "safetensors",
    ) -> Self:
        """Loads `transformer` (the model) and `text_encoder` (its tokenizer or processor) of a local folder, as
        `ModelAdapter.load` does. Raises ValueError for a folder that lacks one of them or cannot be read."""
        try:
            model = cls._load_model(path, dtype, device, load_format) if "transformer" in components else None
            processor = cls.load_processor(path) if "text_encoder" in components else None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(f"model {path} cannot be loaded as a {cls.model_class.__name__}: {error}") from error
        return cls(model, processor, dtype=dtype, device=torch.device(device))

    @classmethod
    def load_processor(cls, path: str | Path) -> Any:
        """The tokenizer of a folder; a family whose prompts bring media gives their processor."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)

    @classmethod
    def load_config(cls, path: str | Path) -> Any:
        """The model's configuration."""
        return cls.model_class.config_class.from_pretrained(str(path), local_files_only=True)

    @classmethod
    def _load_model(cls, path: str | Path, dtype: torch.dtype, device: Any, load_format: LoadFormat) -> nn.Module:
        model: nn.Module
        config = cls.load_config(path)
        if load_format == "safetensors":
            weight_files(Path(path), cls.layout)
            model = cls.model_class.from_pretrained(
                str(path), config=config, dtype=dtype, local_files_only=True, use_safetensors=True
            )
            staging.move(model, device)
            staging.align(model)
        else:
            model = empty_model(lambda: cls.model_class._from_config(config, dtype=dtype), dtype)
        if load_format == "dummy":
            fill_dummy(model, MODEL, device)
            model.to(device)
        return model.eval().requires_grad_(False)

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Returns the model, which is trained and published, by component name."""
        return {} if self.transformer is None else {MODEL: self.transformer}

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        ids = getattr(self.transformer.generation_config, "eos_token_id", None) if self.transformer else None
        if ids is None:
            ids = self._tokenizer.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    @property
    def undrawn_ids(self) -> frozenset[int]:
        """Tokens that are never drawn: those that stand for media."""
        return frozenset()

    def encode(self, prompt: str, media: Sequence[PromptMedia] = ()) -> EncodedPrompt:
        """A prompt in the model's chat template where it has one. Needs the tokenizer. Raises ValueError for media that
        this family does not take, and for a prompt without tokens."""
        if media:
            raise ValueError("this model takes no media: leave them out of the prompts")
        tokenizer = self._tokenizer
        text = prompt
        if tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = torch.tensor(tokenizer(text, add_special_tokens=text is prompt)["input_ids"], dtype=torch.int64)
        if len(token_ids) == 0:
            raise ValueError("the prompt has no tokens: give it a text")
        return EncodedPrompt(token_ids)

    def text(self, token_ids: Tensor) -> str:
        """Decodes written tokens, without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    @property
    def vocabulary_size(self) -> int:
        """Tokens that the model knows; ids are below."""
        return int(self.transformer.get_input_embeddings().num_embeddings)

    def log_probs(self, sequences: Sequence[Tokens], *, temperature: float) -> Tensor:
        """(sum of all T,) float32 on the device, with gradient: log-probs of the written tokens, sequence after
        sequence, under softmax(logits / temperature). All go forward as one row."""
        inputs = self.model_inputs(sequences)
        targets = torch.cat([item.token_ids for item in sequences]).to(self.device)
        lengths = [item.num_inputs for item in sequences]
        self.routing.replay([item.routed_experts for item in sequences], lengths)
        self.attention.lengths = tuple(lengths)
        result: Tensor = self.transformer(**inputs, targets=(targets, self._places(sequences), temperature))
        return result

    def model_inputs(self, sequences: Sequence[Tokens]) -> dict[str, Any]:
        """Arguments of the model for a packed row on the device: `input_ids` and `position_ids` of (1, sum of P + T -
        1), positions from 0 in each sequence. A family whose prompts bring media adds those."""
        rows = [torch.cat([item.prompt.token_ids, item.token_ids[:-1]]) for item in sequences]
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        return {"input_ids": torch.cat(rows)[None].to(self.device), "position_ids": positions[None].to(self.device)}

    def next_positions(self, position_ids: Tensor) -> Tensor:
        """(axes, 1): where the token after a row of one sequence stands; `position_ids` are the row's."""
        return position_ids.max().reshape(1, 1) + 1

    def hidden_states(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """(1, N, width): the last hidden states of a packed row."""
        hidden: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _places(self, sequences: Sequence[Tokens]) -> Tensor:
        """Where in the row the written tokens are predicted."""
        places, start = [], 0
        for item in sequences:
            first = start + len(item.prompt.token_ids) - 1
            places.append(torch.arange(first, first + len(item.token_ids)))
            start += item.num_inputs
        return torch.cat(places).to(self.device)

    @property
    def _tokenizer(self) -> Any:
        if self.processor is None:
            raise ValueError("prompts need the tokenizer: load the adapter with the component text_encoder")
        return getattr(self.processor, "tokenizer", self.processor)


class MediaAdapter(SequenceAdapter):
    """A family whose processor encodes questions with media."""

    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj")

    def encode(self, prompt: str, media: Sequence[PromptMedia] = ()) -> EncodedPrompt:
        if self.processor is None:
            raise ValueError("prompts need the tokenizer: load the adapter with the component text_encoder")
        encoded: EncodedPrompt = self.processor.encode(prompt, media)
        return encoded


def _extend_forward(model: Any, adapter: SequenceAdapter) -> None:
    """Lets the model's own forward, inside which FSDP has gathered its weights, also give log-probs."""
    usual = model.forward

    def forward(*args: Any, targets: tuple[Tensor, Tensor, float] | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return usual(*args, **kwargs)
        token_ids, places, temperature = targets
        hidden = adapter.hidden_states(model, kwargs)[0]
        return token_log_probs(hidden[places], model.lm_head, token_ids, temperature)

    model.forward = forward
