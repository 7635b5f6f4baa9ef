"""A random tiny HunyuanImage-3.0.

`make_tiny_hunyuan_image3(path)` writes the folder as Tencent publishes it: one layer of files in two shards, with the
experts stored one by one, the VAE's tensors among them, and tensors of parts that take no part in drawing.
`make_tiny_hunyuan_image3_instruct` has the chat template and a system prompt of its own.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from flowfleet.models.families.hunyuan_image3.adapter import HunyuanNames, TokenTable
from flowfleet.models.families.hunyuan_image3.transformer import HunyuanImage3Transformer, TransformerConfig
from flowfleet.models.families.hunyuan_image3.vae import HunyuanImage3Vae
from recipes.tiny.components import build_tokenizer

NUM_RATIOS = 33
SYSTEM_PROMPT = "Paint red and green signs."
TOKENS = (
    *("<|startoftext|>", "<pad>", "<boi>", "<eoi>", "<img>", "<cfg>", "<timestep>", "<joint_img_sep>"),
    *("<answer>", "</answer>", "<think>", "</think>", "<recaption>", "</recaption>", "<img_size_1024>"),
    *(f"<img_ratio_{number}>" for number in range(NUM_RATIOS)),
)
CONFIG: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
GENERATION = {"flow_shift": 3.0, "sequence_template": "pretrain", "use_system_prompt": "None", "drop_think": False}
SYSTEM_FILE = f'''other = len("never executed")
unified_system_prompt_en = """{SYSTEM_PROMPT}
"""
t2i_system_prompts = {{"en_vanilla": ["Paint."]}}
'''


def make_tiny_hunyuan_image3(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 checkpoint of the base model under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        path.mkdir(parents=True)
        tokenizer = make_hunyuan_tokenizer()
        tokenizer.save_pretrained(path)
        config = CONFIG | {"vocab_size": len(tokenizer)}
        (path / "config.json").write_text(json.dumps(config))
        (path / "generation_config.json").write_text(json.dumps(GENERATION))
        save_shards(path, make_tensors(config))
    return path


def make_tiny_hunyuan_image3_instruct(path: Path, *, seed: int = 0) -> Path:
    """The same with the template and the system prompt of the Instruct version."""
    make_tiny_hunyuan_image3(path, seed=seed)
    told = GENERATION | {"sequence_template": "instruct", "use_system_prompt": "en_unified"}
    (path / "generation_config.json").write_text(json.dumps(told))
    (path / "system_prompt.py").write_text(SYSTEM_FILE)
    return path


def make_hunyuan_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges, and the special tokens by their names."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer()._tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
    )
    tokenizer.add_tokens([token for token in TOKENS if token not in tokenizer.get_vocab()], special_tokens=True)
    return tokenizer


def make_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the stored tensors by their stored names."""
    shape = TransformerConfig.of(config)
    transformer, vae = HunyuanImage3Transformer(shape), HunyuanImage3Vae(config["vae"])
    table = TokenTable(config["vocab_size"], shape.hidden_size)
    for name, parameter in transformer.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel() if "experts" not in name else parameter.shape[-1]
            nn.init.normal_(parameter, std=fan_in**-0.5)
        elif not name.endswith("bias"):
            nn.init.normal_(parameter, mean=1.0, std=0.1)
    nn.init.normal_(table.weight)
    names = HunyuanNames()
    tensors: dict[str, Tensor] = {}
    for name, parameter in transformer.named_parameters():
        stored = names.of(name, len(parameter))
        parts = [parameter] if len(stored) == 1 else list(parameter)
        tensors |= dict(zip(stored, parts, strict=True))
    tensors |= {f"vae.{name}": parameter for name, parameter in vae.named_parameters()}
    tensors["model.wte.weight"] = table.weight
    tensors["model.ln_f.weight"] = torch.ones(shape.hidden_size)
    tensors["lm_head.weight"] = torch.randn(config["vocab_size"], shape.hidden_size)
    tensors["vision_model.embeddings.patch_embedding.weight"] = torch.randn(4, 4)
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def save_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    """Two files and their index."""
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name].clone() for name in own}, path / file, metadata={"format": "pt"})
    places = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
