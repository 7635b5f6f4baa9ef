"""Tiny policies that write text, with random weights and a tokenizer of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHARACTERS = " 0123456789abcdefghijklmnopqrstuvwxyz+=?"
VOCABULARY = len(CHARACTERS) + 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def save_text_model(path: Path, kind: str = "dense") -> Path:
    """Writes a dense, tied or experts model, whose tokens are unequally likely, and its tokenizer."""
    torch.manual_seed(0)
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False))
        if kind == "experts"
        else Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied"))
    )
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{character: place + 2 for place, character in enumerate(CHARACTERS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
