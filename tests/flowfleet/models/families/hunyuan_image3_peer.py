"""vLLM-Omni's HunyuanImage-3.0 on a tiny checkpoint, as a process of its own: what ours is compared with.

    python -m tests.flowfleet.models.families.hunyuan_image3_peer CHECKPOINT INPUTS OUTPUTS

It is imported where torchvision is absent, whose transforms only its picture processor would call. The transformer's
weights go through its own loader, under the names of the checkpoint's files. What is not vLLM-Omni's here: its
attention casts rotated queries and keys to bfloat16 whatever the model's dtype, which is lifted to the model's; its
experts' kernel, which is CUDA's, is a loop over its own packed weights in float64; and SiLU times the other half, a
kernel too, is torch's.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from recipes.tiny_unified.hunyuan_image3 import SYSTEM_PROMPT

PACKAGE = "vllm_omni.diffusion.models.hunyuan_image3"


def main(checkpoint: Path, inputs: Path, outputs: Path) -> None:
    os.environ |= {"FLOWFLEET_VLLM_OMNI": "1", "VLLM_TARGET_DEVICE": "cpu"}
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1"}
    transformer, pipeline = import_peer()
    with ExitStack() as stack:
        enter_environment(stack)
        peer = Peer(transformer, pipeline, checkpoint)
        save_file(peer.run(load_file(inputs)), outputs)


def import_peer() -> tuple[Any, Any]:
    """Its modules of transformer and pipeline."""
    import diffusers  # noqa: F401  # before torchvision seems to be there
    import transformers

    library: Any = transformers
    library.Siglip2ImageProcessorFast = object
    from services.rollout.engines.vllm_omni import slim_imports

    slim_imports.install()
    import vllm_omni

    slim_imports._register(PACKAGE, Path(str(vllm_omni.__file__)).parent / "diffusion" / "models" / "hunyuan_image3")
    torchvision: Any = ModuleType("torchvision")
    torchvision.transforms = ModuleType("torchvision.transforms")
    torchvision.__spec__ = ModuleSpec("torchvision", None)
    sys.modules |= {"torchvision": torchvision, "torchvision.transforms": torchvision.transforms}
    transformer: Any = import_module(f"{PACKAGE}.hunyuan_image3_transformer")
    transformer.SiluAndMul = NativeSiluAndMul
    transformer.torch = Torch()
    return transformer, import_module(f"{PACKAGE}.pipeline_hunyuan_image3")


class Torch:
    """torch for a module that writes bfloat16 where it means the model's dtype."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class NativeSiluAndMul(nn.Module):
    """What vLLM's kernel of this name computes."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def enter_environment(stack: ExitStack) -> None:
    """One process as a whole fleet of vLLM-Omni's."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm_omni.diffusion.forward_context import set_forward_context

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    stack.enter_context(set_forward_context(config, OmniDiffusionConfig(model="none")))
    stack.enter_context(set_current_vllm_config(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=place, local_rank=0)
    initialize_model_parallel()


class Peer:
    """Its pipeline, of which nothing but transformer, projections and tokenizer is made."""

    def __init__(self, transformer: Any, pipeline: Any, checkpoint: Path) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase

        self._module, self._checkpoint = transformer, checkpoint
        settings = json.loads((checkpoint / "config.json").read_text())
        self._generation = json.loads((checkpoint / "generation_config.json").read_text())
        config = transformer.HunyuanImage3Config(**settings)
        tensors: dict[str, Tensor] = {}
        for file in sorted(checkpoint.glob("model-*.safetensors")):
            tensors |= load_file(file)
        pipe: Any = pipeline.HunyuanImage3Pipeline.__new__(pipeline.HunyuanImage3Pipeline)
        nn.Module.__init__(pipe)
        pipe.config, pipe.vllm_config, pipe.od_config = config, get_current_vllm_config(), None
        pipe.model = transformer.HunyuanImage3Model(config).float()
        body = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        loaded = pipe.model.load_weights(iter(body.items()))
        self.missing = sorted(dict(pipe.model.named_parameters()).keys() - loaded)
        for linear in (part for part in pipe.model.modules() if isinstance(part, LinearBase)):
            linear.cpu_linear = F.linear  # vLLM's workers choose one after loading
        for layer in pipe.model.layers:
            layer.mlp.experts.forward = partial(experts_forward, layer.mlp, settings["moe_topk"][0])
        width, inner = config.hidden_size, config.patch_embed_hidden_dim
        latents = settings["vae"]["latent_channels"]
        for name in ("timestep_emb", "time_embed", "time_embed_2"):
            setattr(pipe, name, transformer.TimestepEmbedder(hidden_size=width))
        pipe.patch_embed = transformer.UNetDown(1, latents, width, inner, width)
        pipe.final_layer = transformer.UNetUp(1, width, width, inner, latents, out_norm=True)
        for name in ("timestep_emb", "time_embed", "time_embed_2", "patch_embed", "final_layer"):
            own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            getattr(pipe, name).load_state_dict(own)
        self._pipe = pipe.eval()
        self._vae = import_module(f"{PACKAGE}.autoencoder").AutoencoderKLConv3D.from_config(settings["vae"]).eval()
        self._vae.load_state_dict(
            {name.removeprefix("vae."): t for name, t in tensors.items() if name.startswith("vae.")}
        )
        self._words = import_module(f"{PACKAGE}.hunyuan_image3_tokenizer").TokenizerWrapper(
            PreTrainedTokenizerFast.from_pretrained(str(checkpoint))
        )

    @torch.no_grad()
    def run(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Velocities with and without prompt of each row, and the token ids that they came from."""
        assert not self.missing, self.missing
        found: dict[str, Tensor] = {}
        for row, latents in enumerate(given["latents"]):
            prompt = bytes(given[f"prompt_{row}"].tolist()).decode()
            found |= self._row(row, prompt, latents, given["timesteps"][row], given["size"].tolist())
        found["pixels"] = self._vae.decode(given["planes"].unsqueeze(2), return_dict=False)[0].squeeze(2)
        found["moments"] = self._vae.encode(given["pixels"]).latent_dist.parameters.squeeze(2)
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def _row(self, row: int, prompt: str, latents: Tensor, timestep: Tensor, size: list[int]) -> dict[str, Tensor]:
        module, pipe = self._module, self._pipe
        group = module.ResolutionGroup(base_size=1024)
        base, ratio = group.get_base_size_and_ratio_index(size[1], size[0])
        info = module.ImageInfo(
            image_type="gen_image",
            image_height=size[0],
            image_width=size[1],
            token_height=size[0] // 16,
            token_width=size[1] // 16,
            base_size=base,
            ratio_index=ratio,
        )
        told = self._words.apply_chat_template(
            batch_prompt=[prompt],
            mode="gen_image",
            batch_gen_image_info=[info],
            batch_system_prompt=[SYSTEM_PROMPT if self._generation["use_system_prompt"] != "None" else None],
            bot_task="image",
            sequence_template=self._generation["sequence_template"],
            cfg_factor=2,
        )
        output, length = told["output"], told["output"].tokens.shape[1]
        layout = import_module(f"{PACKAGE}.request_layout")
        arguments: dict[str, Any] = {"tokenizer_output": output}
        mask = pipe._prepare_attention_mask_for_generation(output.tokens, None, arguments)
        rope = module.build_batch_2d_rope(
            image_infos=layout.build_hunyuan_batch_rope_image_info(output, told["sections"]),
            seq_len=length,
            n_elem=pipe.config.attention_head_dim,
            base=pipe.config.rope_theta,
        )
        made = pipe.forward_call(
            input_ids=output.tokens,
            attention_mask=mask,
            position_ids=torch.arange(length)[None].expand(2, -1),
            use_cache=False,
            return_dict=True,
            custom_pos_emb=rope,
            mode="gen_image",
            first_step=True,
            images=latents[None].repeat(2, 1, 1, 1),
            image_mask=output.gen_image_mask,
            timestep=timestep.repeat(2),
            gen_timestep_scatter_index=output.gen_timestep_scatter_index,
            query_lens=[length] * 2,
            seq_lens=[length] * 2,
            num_image_tokens=layout.hunyuan_num_image_tokens(info),
            num_special_tokens=layout.hunyuan_num_special_tokens(info),
            full_attn_spans=arguments["full_attn_spans"],
        )
        positive, negative = made.diffusion_prediction.float()
        before = int(output.gen_timestep_scatter_index[0, -1])
        return {
            f"positive_{row}": positive,
            f"negative_{row}": negative,
            f"ids_{row}": output.tokens[:, :before],
        }


def experts_forward(block: Any, top_k: int, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    """The layer's packed weights (gate first, up behind it), expert by expert in float64, and its shared expert."""
    weights = dict(block.experts.named_parameters())
    first, second = (
        next(value.double() for name, value in weights.items() if name.endswith(end))
        for end in ("w13_weight", "w2_weight")
    )
    scores, chosen = router_logits.double().softmax(-1).topk(top_k)
    scores = scores / scores.sum(-1, keepdim=True)
    tokens = hidden_states.double()
    out = torch.zeros_like(tokens)
    for place, (token, experts) in enumerate(zip(tokens, chosen.tolist(), strict=True)):
        for rank, expert in enumerate(experts):
            gate, up = (first[expert] @ token).chunk(2)
            out[place] += scores[place, rank] * (second[expert] @ (F.silu(gate) * up))
    shared: Tensor = block.shared_mlp(hidden_states)
    return out.to(hidden_states.dtype) + shared


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
