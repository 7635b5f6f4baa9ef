"""A checkpoint folder of BAGEL, as ByteDance publishes it: no pipeline of diffusers, no model of transformers.

    config.json       the whole model, its class among them
    llm_config.json   Qwen2          vit_config.json   SigLIP, whose last layer is not used
    ema.safetensors   all weights but the VAE's, or the files that model.safetensors.index.json names
    ae.safetensors    FLUX's VAE, by the names of its authors
    tokenizer files   Qwen2's

`max_latent_size` in `config.json` may be too small: the table of positions in the weights decides.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import AutoencoderKL
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file

from flowfleet.models.empty import empty_model
from flowfleet.models.families.bagel.transformer import Bagel, BagelConfig
from flowfleet.models.files import Prefixed, WeightFiles
from flowfleet.models.files import read_config as read_json
from flowfleet.models.loading import LoadFormat, fill_dummy
from flowfleet.models.weight_files import BAGEL

_TABLE: Final = "latent_pos_embed.pos_embed"
_FLUX_VAE: Final = {
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "z_channels": 16,
    "scale_factor": 0.3611,
    "shift_factor": 0.1159,
}
"""Settings that `vae_config` leaves out."""


def read_config(path: str | Path) -> BagelConfig:
    """Raises ValueError for a folder that lacks a configuration, or whose configuration lacks a setting."""
    folder = Path(path)
    whole, llm, vit = (read_json(folder, f"{name}config.json") for name in ("", "llm_", "vit_"))
    vae = _vae_settings(whole)
    try:
        return BagelConfig(
            vocab_size=int(llm["vocab_size"]),
            hidden_size=int(llm["hidden_size"]),
            intermediate_size=int(llm["intermediate_size"]),
            num_layers=int(llm["num_hidden_layers"]),
            num_heads=int(llm["num_attention_heads"]),
            num_key_heads=int(llm["num_key_value_heads"]),
            norm_eps=float(llm.get("rms_norm_eps", 1e-6)),
            rope_theta=float(llm.get("rope_theta", 1e6)),
            latent_channels=int(vae["z_channels"]),
            latent_patch=int(whole.get("latent_patch_size", 2)),
            latent_side=_stored_side(folder) or int(whole.get("max_latent_size", 64)),
            vit_width=int(vit["hidden_size"]),
            vit_intermediate_size=int(vit["intermediate_size"]),
            vit_layers=int(vit["num_hidden_layers"]) - 1,
            vit_heads=int(vit["num_attention_heads"]),
            vit_patch=int(vit["patch_size"]),
            vit_positions=(int(vit["image_size"]) // int(vit["patch_size"])) ** 2,
            vit_eps=float(vit.get("layer_norm_eps", 1e-6)),
            vit_side=int(whole.get("vit_max_num_patch_per_side", 70)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is not the configuration of a BAGEL: {error!r}") from error


def load_transformer(path: str | Path, dtype: torch.dtype, device: Any, load_format: LoadFormat, name: str) -> Bagel:
    """The transformer, frozen and in evaluation mode; `name` is its component's, of which dummies are drawn.

    Raises ValueError for a folder whose weights lack a tensor, have one in another shape or cannot be read.
    """
    config = read_config(path)
    model: Any = empty_model(lambda: Bagel(config), dtype)
    if load_format == "safetensors":
        WeightFiles(Path(path), BAGEL).fill(model, Prefixed(), device, dtype)
    elif load_format == "dummy":
        fill_dummy(model, name, device)
    if load_format != "empty":
        model.to(device)
    frozen: Bagel = model.eval().requires_grad_(False)
    return frozen


def vae_config(path: str | Path) -> dict[str, Any]:
    """Settings of diffusers' `AutoencoderKL` for this VAE."""
    part = _vae_settings(read_json(path))
    depth = len(part["ch_mult"])
    return {
        "down_block_types": ("DownEncoderBlock2D",) * depth,
        "up_block_types": ("UpDecoderBlock2D",) * depth,
        "block_out_channels": tuple(part["ch"] * factor for factor in part["ch_mult"]),
        "layers_per_block": part["num_res_blocks"],
        "latent_channels": part["z_channels"],
        "scaling_factor": part["scale_factor"],
        "shift_factor": part["shift_factor"],
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


def load_vae(path: str | Path, dtype: torch.dtype, device: Any, load_format: LoadFormat) -> AutoencoderKL:
    """FLUX's VAE in diffusers' class, frozen. Raises ValueError where its weights cannot be read."""
    settings: Any = vae_config(path)
    vae: Any = empty_model(lambda: AutoencoderKL(**settings), dtype)
    if load_format == "safetensors":
        file = Path(path) / BAGEL.others[0]
        try:
            stored = convert_ldm_vae_checkpoint(load_file(file), dict(vae.config))
            vae.load_state_dict({name: tensor.to(dtype) for name, tensor in stored.items()}, assign=True)
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            raise ValueError(f"{file} cannot be read as the weights of FLUX's VAE: {error}") from error
    elif load_format == "dummy":
        fill_dummy(vae, "vae", device)
    if load_format != "empty":
        vae.to(device)
    frozen: AutoencoderKL = vae.eval().requires_grad_(False)
    return frozen


def _vae_settings(whole: Mapping[str, Any]) -> dict[str, Any]:
    return _FLUX_VAE | (whole.get("vae_config") or {})


def _stored_side(folder: Path) -> int | None:
    """Tokens in a row of the table of positions; None where no weights are here."""
    try:
        files = WeightFiles(folder, BAGEL)
    except ValueError:
        return None
    return math.isqrt(files.shape(_TABLE)[0]) if _TABLE in files else None
