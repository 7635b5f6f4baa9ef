"""What vLLM-Omni's BAGEL computes on a checkpoint, in a process of its own that has called `slim_imports.install`.

Its transformer is loaded by its pipeline's own loader and runs on the project's CPU platform. Four things are changed:
its casts to bfloat16 inside attention are to float32; SiLU is torch's, for vLLM's is compiled code; the picture encoder
applies the layer norm after its last layer, as its authors' does; and that encoder's weights of patches are read colors
last, as vLLM's other BAGEL reads them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, SiglipVisionConfig, SiglipVisionModel
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.transformers_utils.configs.bagel import BagelConfig
from vllm_omni.diffusion.models.bagel import autoencoder, bagel_transformer, pipeline_bagel

PROMPTS = ["A red sign", "a green blue white sign that says nothing at all"]
NEGATIVES = ["", "white"]
SIZE = 32, 48
POINTS = 5
GUIDANCES: tuple[dict[str, Any], ...] = (
    {"cfg_text_scale": 1.0, "cfg_img_scale": 1.0, "cfg_interval": (0.0, 1.0), "cfg_renorm_type": "global"},
    {"cfg_text_scale": 4.0, "cfg_img_scale": 1.0, "cfg_interval": (0.0, 1.0), "cfg_renorm_type": "global"},
    {"cfg_text_scale": 4.0, "cfg_img_scale": 1.5, "cfg_interval": (0.4, 1.0), "cfg_renorm_type": "global"},
    {"cfg_text_scale": 3.0, "cfg_img_scale": 1.5, "cfg_interval": (0.4, 1.0), "cfg_renorm_type": "channel"},
    {"cfg_text_scale": 3.0, "cfg_img_scale": 1.5, "cfg_interval": (0.0, 0.9), "cfg_renorm_type": "text_channel"},
)
QUESTION = "which color is the sign"
NUM_TOKENS = 12


class _Float32(SimpleNamespace):
    """torch, whose bfloat16 is float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class _Pictures(pipeline_bagel.SiglipNaViTWrapper):  # type: ignore[misc]
    def forward(self, **inputs: Any) -> Tensor:
        normed: Tensor = self.vision_model.post_layernorm(super().forward(**inputs))
        return normed


def load(folder: Path) -> Any:
    """A `BagelPipeline` with its transformer, its VAE at the checkpoint's sizes, and their weights."""
    whole = json.loads((folder / "config.json").read_text())
    llm = bagel_transformer.Qwen2MoTConfig.from_json_file(folder / "llm_config.json")
    llm.qk_norm, llm.tie_word_embeddings, llm.layer_module = True, False, "Qwen2MoTDecoderLayer"
    vit = SiglipVisionConfig.from_json_file(folder / "vit_config.json")
    vit.num_hidden_layers -= 1
    vit.vision_use_head = False
    pipeline = pipeline_bagel.BagelPipeline.__new__(pipeline_bagel.BagelPipeline)
    nn.Module.__init__(pipeline)
    pipeline.vit_model = _Pictures(SiglipVisionModel(vit))
    pipeline.language_model = bagel_transformer.Qwen2MoTForCausalLM(llm)
    pipeline.vae = autoencoder.AutoEncoder(
        autoencoder.AutoEncoderParams(256, 3, 8, 32, 3, [1, 1, 1, 1], 1, 16, scale_factor=0.3611, shift_factor=0.1159)
    )
    pipeline.bagel = bagel_transformer.Bagel(
        pipeline.language_model,
        pipeline.vit_model,
        BagelConfig(
            llm_config=llm,
            vae_config=SimpleNamespace(z_channels=16, downsample=8),
            vit_config=vit,
            vit_max_num_patch_per_side=whole["vit_max_num_patch_per_side"],
            latent_patch_size=whole["latent_patch_size"],
            max_latent_size=whole["max_latent_size"],
        ),
    )
    stored = load_file(folder / "ema.safetensors") | load_file(folder / "ae.safetensors")
    name = "vit_model.vision_model.embeddings.patch_embedding.weight"
    patch = vit.patch_size
    colors_first = stored[name].view(-1, patch, patch, 3).permute(0, 3, 1, 2).contiguous()
    loaded = pipeline.load_weights(iter((stored | {name: colors_first}).items()))
    for module in pipeline.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    pipeline.stored, pipeline.unfilled = set(stored), unfilled(pipeline, loaded)
    return pipeline.eval()


def unfilled(pipeline: Any, loaded: set[str]) -> list[str]:
    """Parameters that no stored tensor went to, by any of their names: modules are shared."""
    filled = {id(parameter) for name, parameter in pipeline.named_parameters(remove_duplicate=False) if name in loaded}
    return [name for name, parameter in pipeline.named_parameters() if id(parameter) not in filled]


def ids_of(tokenizer: Any) -> dict[str, int]:
    names = ("bos_token_id", "eos_token_id", "start_of_image", "end_of_image")
    tokens = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True))


def paint(pipeline: Any, tokenizer: Any, prompt: str, negative: str, noise: Tensor, guidance: dict[str, Any]) -> Tensor:
    bagel, ids = pipeline.bagel, ids_of(tokenizer)

    def context(text: str) -> tuple[Any, list[int], list[int]]:
        cache, lengths, ropes = bagel_transformer.NaiveCache(bagel.config.llm_config.num_hidden_layers), [0], [0]
        if text:
            inputs, lengths, ropes = bagel.prepare_prompts(lengths, ropes, [text], tokenizer, ids)
            cache = bagel.forward_cache_update_text(cache, **inputs)
        return cache, lengths, ropes

    (cache, lengths, ropes), (other, own, others) = context(prompt), context(negative)
    inputs = bagel.prepare_vae_latent(lengths, ropes, [SIZE], ids)
    text = bagel.prepare_vae_latent_cfg(own, others, [SIZE])["cfg_packed_position_ids"]
    image = bagel.prepare_vae_latent_cfg(lengths, ropes, [SIZE])["cfg_packed_position_ids"]
    inputs["packed_init_noises"] = noise
    latents, *_ = bagel.generate_image(
        past_key_values=cache,
        cfg_text_past_key_values=other,
        cfg_img_past_key_values=cache,
        cfg_text_packed_position_ids=text,
        cfg_img_packed_position_ids=image,
        num_timesteps=POINTS,
        timestep_shift=3.0,
        **guidance,
        **inputs,
    )
    return latents[0]


def answer(pipeline: Any, tokenizer: Any, patches: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, vocabulary) along the likeliest tokens (N,), which answer a question with a picture."""
    bagel, ids = pipeline.bagel, ids_of(tokenizer)
    cache = bagel_transformer.NaiveCache(bagel.config.llm_config.num_hidden_layers)
    count, side = len(patches), int((patches.shape[1] // 3) ** 0.5)
    colors_first = patches.view(count, side, side, 3).permute(0, 3, 1, 2).flatten(1)  # as its own are
    cache = bagel.forward_cache_update_vit(
        cache,
        packed_text_ids=torch.tensor([ids["start_of_image"], ids["end_of_image"]]),
        packed_text_indexes=torch.tensor([0, count + 1]),
        packed_vit_tokens=colors_first,
        packed_vit_token_indexes=torch.arange(1, count + 1),
        packed_vit_position_ids=places,
        vit_token_seqlens=torch.tensor([count], dtype=torch.int),
        packed_position_ids=torch.zeros(count + 2, dtype=torch.long),
        packed_seqlens=torch.tensor([count + 2], dtype=torch.int),
    )
    inputs, _, ropes = bagel.prepare_prompts([count + 2], [1], [QUESTION], tokenizer, ids)
    cache = bagel.forward_cache_update_text(cache, **inputs)
    token, position = torch.tensor([ids["bos_token_id"]]), torch.tensor(ropes)
    logits, tokens = [], []
    for _ in range(NUM_TOKENS):
        output = pipeline.language_model(
            packed_text_ids=token,
            query_lens=torch.ones_like(token),
            packed_query_position_ids=position,
            past_key_values=cache,
            mode="und",
        )
        logits.append(pipeline.language_model.lm_head(output.packed_query_sequence)[0])
        token, position = logits[-1].argmax()[None], position + 1
        tokens.append(token[0])
    return torch.stack(logits), torch.stack(tokens)


@torch.no_grad()
def main(folder: Path, output: Path) -> None:
    bagel_transformer.torch, bagel_transformer.SiluAndMul = _Float32(), _Silu
    bagel_transformer.get_classifier_free_guidance_world_size = lambda: 1
    with tempfile.TemporaryDirectory() as store, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        initialize_model_parallel()
        pipeline = load(folder)
        tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        given = load_file(output / "inputs.safetensors")
        found = {
            f"latents.{number}.{row}": paint(pipeline, tokenizer, prompt, negative, given["noise"][row], guidance)
            for number, guidance in enumerate(GUIDANCES)
            for row, (prompt, negative) in enumerate(zip(PROMPTS, NEGATIVES, strict=True))
        }
        timesteps, _ = pipeline.bagel.prepare_denoise_schedule(given["noise"][0], POINTS, 3.0)
        logits, tokens = answer(pipeline, tokenizer, given["patches"], given["places"])
        pixels = pipeline.vae.decode(given["planes"])
    found |= {"logits": logits, "tokens": tokens, "timesteps": timesteps, "pixels": pixels}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, output / "found.safetensors")
    names = {"stored": sorted(pipeline.stored), "unfilled": pipeline.unfilled}
    (output / "names.json").write_text(json.dumps(names))
