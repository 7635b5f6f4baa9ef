"""HunyuanImage-3.0's transformer as it draws: prompt and noisy picture in one sequence.

https://arxiv.org/abs/2509.23951

    [prompt, <boi>, size, ratio | timestep | one token a latent pixel, row by row]

Prompt and timestep see what comes before them; the picture sees all of the sequence. Latents become tokens by a
convolution and a residual block, and tokens become the velocity by the same in reverse, both conditioned on the time.
Embeddings of the prompt are an input: the table of the vocabulary, the output layer and the encoder of condition
pictures take no part in drawing, and are not here. The names of parameters are those of the published files, but for
the experts of a layer, which are two tensors with one row an expert: so FSDP2 spreads them over the ranks expert by
expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from peft import inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.models.time_embedding import TimeEmbedding
from flowfleet.quantization.experts import ExpertWeights

GROUPS = 32
"""Groups of every group norm."""
_LAYER_LISTS = ("num_experts", "num_shared_expert", "moe_topk", "moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True)
class TransformerConfig:
    """Settings of the transformer, from a checkpoint's `config.json`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    """Inner width of the expert that every token takes."""
    latent_channels: int
    patch_width: int
    """Channels between latents and tokens."""
    eps: float
    rope_theta: float
    uses_qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Raises ValueError for a kind of HunyuanImage-3.0 that this is not, or a missing setting."""
        _refuse_others(config)
        try:
            values = {name: _one(config, name) for name in _LAYER_LISTS if config.get(name) is not None}
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                hidden_size=width,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config.get("attention_head_dim") or width // heads),
                num_experts=values["num_experts"],
                top_k=values["moe_topk"],
                expert_width=values.get("moe_intermediate_size", values["intermediate_size"]),
                shared_width=values["intermediate_size"] * values.get("num_shared_expert", 1),
                latent_channels=int(config["vae"]["latent_channels"]),
                patch_width=int(config.get("patch_embed_hidden_dim", 1024)),
                eps=float(config.get("rms_norm_eps", 1e-5)),
                rope_theta=float(config.get("rope_theta", 10000.0)),
                uses_qk_norm=bool(config.get("use_qk_norm", False)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json of this HunyuanImage-3.0 lacks {error}") from error


def _one(config: Mapping[str, Any], name: str) -> int:
    """A setting that may be given for each layer, and is the same for all."""
    value = config[name]
    different = set(value) if isinstance(value, list) else {value}
    if len(different) != 1:
        raise ValueError(f"config.json gives layers different {name}, which this transformer does not take")
    return int(different.pop())


def _refuse_others(config: Mapping[str, Any]) -> None:
    for name in ("cfg_distilled", "use_meanflow"):
        if config.get(name):
            raise ValueError(
                f"this checkpoint is distilled ({name} in its config.json): use HunyuanImage-3.0 or its Instruct model"
            )
    expected = {"patch_size": 1, "img_proj_type": "unet", "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0}
    expected |= {"hidden_act": "silu", "use_cla": False, "attention_bias": False, "mlp_bias": False}
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"config.json has {name} = {config[name]!r}, and this transformer is made for {value!r}")


class HunyuanImage3Transformer(nn.Module):
    """Velocities of noisy latents after encoded prompts."""

    _no_split_modules = ("HunyuanImage3DecoderLayer",)

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, latents = config.hidden_size, config.latent_channels
        self.model = Decoder(config)
        self.timestep_emb = TimeEmbedding(width, nn.GELU())
        self.time_embed = TimeEmbedding(width, nn.GELU())
        self.time_embed_2 = TimeEmbedding(width, nn.GELU())
        self.patch_embed = PatchEmbed(latents, config.patch_width, width)
        self.final_layer = FinalLayer(width, config.patch_width, latents)

    def add_adapter(self, config: Any, adapter_name: str = "default") -> None:
        """Puts an adapter of PEFT into the layers, as models of diffusers do."""
        inject_adapter_in_model(config, self, adapter_name)

    def forward(self, latents: Tensor, timesteps: Tensor, embeds: Tensor, mask: Tensor | None = None) -> Tensor:
        """dx/dsigma (B, Z, h, w) in the dtype of `embeds`.

        Args:
            latents: (B, Z, h, w).
            timesteps: (B,) float32, 1000 sigma.
            embeds: (B, P, D) of the prompts, right-padded, up to and with the tokens of size and ratio.
            mask: (B, P) bool, False where padded; None where nothing is.
        """
        rows, columns = latents.shape[-2:]
        picture = self.patch_embed(latents.to(embeds.dtype), self.time_embed(timesteps))
        time = self.timestep_emb(timesteps).unsqueeze(1)
        hidden = torch.cat([embeds, time, picture], dim=1)
        rotary = rotary_table(embeds.shape[1], (rows, columns), mask, self.config, embeds.device)
        hidden = self.model(hidden, rotary, embeds.shape[1] + 1, mask)
        velocity: Tensor = self.final_layer(hidden[:, -rows * columns :], self.time_embed_2(timesteps), rows, columns)
        return velocity


def rotary_table(
    num_tokens: int, grid: tuple[int, int], mask: Tensor | None, config: TransformerConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B or 1, 1, P + 1 + h w, head_dim / 2) float32 of 2-D rotary positions.

    Text is at (i, i) for its place i. A picture of h rows and w columns whose first token is at place L has its center
    on the diagonal: row y and column x are at L + ⌊(h w − h) / 2⌋ + y and L + ⌊(h w − w) / 2⌋ + x. Frequencies turn by
    rows and columns in turn.
    """
    rows, columns = grid
    length = torch.full((1, 1), num_tokens, device=device) if mask is None else mask.sum(1, keepdim=True)
    text = torch.arange(num_tokens, device=device).expand(len(length), -1)
    prefix = torch.cat([text, length], dim=1)
    first = length + 1
    down = torch.arange(rows, device=device).repeat_interleave(columns) + (rows * columns - rows) // 2
    right = torch.arange(columns, device=device).repeat(rows) + (rows * columns - columns) // 2
    places = torch.stack([torch.cat([prefix, first + down], 1), torch.cat([prefix, first + right], 1)], dim=-1)
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    theta = (1.0 / config.rope_theta**exponents).view(-1, 2)
    angles = (places.unsqueeze(-2) * theta).flatten(-2).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates (B, heads, S, head_dim), whose first half is turned with the second, in float32."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """The layers. The norm that follows them in text is not applied to pictures."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HunyuanImage3DecoderLayer(config) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_causal: int, mask: Tensor | None) -> Tensor:
        masks = None if mask is None else attention_masks(mask, hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotary, num_causal, masks)
        return hidden


def attention_masks(mask: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Makes masks of prompts with padding (B, P): what the causal part sees, (B, 1, P + 1, P + 1), and what the picture
    sees, (B, 1, 1, S). A token always sees itself, so that none sees nothing."""
    causal = F.pad(mask, (0, 1), value=True)
    seen = causal[:, None, None, :] & torch.ones(causal.shape[1], causal.shape[1], device=mask.device).tril().bool()
    seen = seen | torch.eye(causal.shape[1], dtype=torch.bool, device=mask.device)
    return seen, F.pad(causal, (0, num_tokens - causal.shape[1]), value=True)[:, None, None, :]


class HunyuanImage3DecoderLayer(nn.Module):
    """Attention and mixture of experts, each after a norm and added to its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MixtureOfExperts(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.eps)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_causal: int, masks: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, num_causal, masks)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class Attention(nn.Module):
    """Grouped-query attention. Queries and keys are rotated first and normed then."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.num_groups = config.num_heads // config.num_kv_heads
        inner = config.num_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, inner + 2 * config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.query_layernorm = nn.RMSNorm(config.head_dim, config.eps) if config.uses_qk_norm else nn.Identity()
        self.key_layernorm = nn.RMSNorm(config.head_dim, config.eps) if config.uses_qk_norm else nn.Identity()

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_causal: int, masks: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The rows of `qkv_proj` are, for each key head, those of its queries, its own and its values'."""
        shape = (self.num_kv_heads, self.num_groups + 2, self.head_dim)
        qkv = self.qkv_proj(hidden)
        qkv = qkv.view(*qkv.shape[:2], *shape)
        query, key, value = torch.split(qkv, [self.num_groups, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        query = self.query_layernorm(rotate(query, rotary))
        key = self.key_layernorm(rotate(key, rotary))
        text = _attend(query[:, :, :num_causal], key[:, :, :num_causal], value[:, :, :num_causal], masks, 0)
        picture = _attend(query[:, :, num_causal:], key, value, masks, 1)
        attended = torch.cat([text, picture], dim=2).transpose(1, 2).flatten(2)
        out: Tensor = self.o_proj(attended)
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, masks: tuple[Tensor, Tensor] | None, part: int) -> Tensor:
    """Part 0 is causal, part 1 sees everything; without padding neither needs a mask."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if masks is None else masks[part],
        is_causal=masks is None and part == 0,
        enable_gqa=True,
    )


class MixtureOfExperts(nn.Module):
    """The k experts that the router gives the greatest probabilities, weighted by these over their sum, and one shared
    expert."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = Router(config)
        self.shared_mlp = SharedExpert(config)
        self.experts = Experts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        scores, chosen = self.gate(tokens).softmax(-1).topk(self.top_k)
        if self.top_k > 1:
            scores = scores / scores.sum(-1, keepdim=True)
        mixed = self.experts(tokens, scores.to(hidden.dtype), chosen)
        out: Tensor = self.shared_mlp(hidden) + mixed.view_as(hidden)
        return out


class Router(nn.Module):
    """Logits of the experts, computed in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.wg = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens.float(), self.wg.weight.float())


class SharedExpert(nn.Module):
    """A SwiGLU whose first linear's last half is the gate."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(config.hidden_size, 2 * config.shared_width, bias=False)
        self.down_proj = nn.Linear(config.shared_width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(_gated(self.gate_and_up_proj(hidden)))
        return out


class Experts(ExpertWeights):
    """SwiGLUs in two tensors, computed by grouped matrix products over the tokens sorted by expert."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        count, width, hidden = config.num_experts, config.expert_width, config.hidden_size
        self.gate_and_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))
        for weight in (self.gate_and_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """(T, D) of tokens (T, D), with scores and numbers (T, k) of their experts."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        inverse = order.argsort()
        numbers = torch.arange(len(self.down_proj), device=tokens.device)
        ends = (experts.unsqueeze(1) == numbers).sum(0).cumsum(0).to(torch.int32)
        rows: Tensor = _Dispatch.apply(tokens, order, inverse)  # type: ignore[no-untyped-call]
        inner = _gated(self.grouped("gate_and_up_proj", rows, ends))
        outer = self.grouped("down_proj", inner, ends)
        back: Tensor = _Permute.apply(outer, inverse, order)  # type: ignore[no-untyped-call]
        mixed: Tensor = (back.view(*scores.shape, -1) * scores.unsqueeze(-1)).sum(1)
        return mixed


class _Dispatch(torch.autograd.Function):
    """Row order[i] // k of the tokens (T, D) as row i of (T k, D). Its backward adds up without atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = len(order) // len(tokens)
        return tokens[order // ctx.top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse].view(-1, ctx.top_k, gradients[0].shape[-1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; `inverse` undoes `order`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


def _gated(inner: Tensor) -> Tensor:
    up, gate = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


class TimeBlock(nn.Module):
    """A residual block of convolutions whose second group norm is scaled and shifted by the time."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, padding=1)
        second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.in_layers = nn.Sequential(nn.GroupNorm(GROUPS, inputs), nn.SiLU(), first)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_width, 2 * outputs))
        self.out_layers = nn.Sequential(nn.GroupNorm(GROUPS, outputs), nn.SiLU(), nn.Identity(), second)
        self.skip_connection = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, planes: Tensor, time: Tensor) -> Tensor:
        norm, *rest = self.out_layers
        scale, shift = self.emb_layers(time)[:, :, None, None].chunk(2, dim=1)
        inner = norm(self.in_layers(planes)) * (1 + scale) + shift
        for layer in rest:
            inner = layer(inner)
        out: Tensor = self.skip_connection(planes) + inner
        return out


class PatchEmbed(nn.Module):
    """Latents (B, Z, h, w) to tokens (B, h w, D)."""

    def __init__(self, channels: int, inner: int, width: int) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Conv2d(channels, inner, 3, padding=1), TimeBlock(inner, width, width)])

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        planes: Tensor = self.model[1](self.model[0](latents), time)
        return planes.flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Tokens (B, h w, D) to velocities (B, Z, h, w)."""

    def __init__(self, width: int, inner: int, channels: int) -> None:
        super().__init__()
        out = nn.Sequential(nn.GroupNorm(GROUPS, inner), nn.SiLU(), nn.Conv2d(inner, channels, 3, padding=1))
        self.model = nn.ModuleList([TimeBlock(width, inner, width), out])

    def forward(self, tokens: Tensor, time: Tensor, rows: int, columns: int) -> Tensor:
        planes = tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)
        out: Tensor = self.model[1](self.model[0](planes, time))
        return out
