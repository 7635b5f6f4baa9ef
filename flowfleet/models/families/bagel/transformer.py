"""BAGEL's transformer for training: Qwen2 with two experts a layer, the picture encoder and the projections of latents.

Each layer has weights for understanding (text, and pictures that are looked at) and others, `…_moe_gen`, for the
latents that are painted; both kinds of tokens meet in one attention. Names of parameters are those of the published
checkpoint. Linears, norms and rotary positions compute as Qwen2's; queries and keys are normalized by head, and that
and their rotation are in float32.

    paint   text (causal), then <start> <end> and the latents, which see the text and each other
    write   a row of packed sequences; inside a picture every token sees every other, all else is causal

A painted picture has one rotary position, that after its text. Timesteps are sigma, from 0 to 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.models.time_embedding import MAX_PERIOD, TimeEmbedding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries (B, heads, N, D) and keys and values (B, key heads, N, D) to (B, heads, N, D)."""


@dataclass(frozen=True)
class BagelConfig:
    """Settings from a checkpoint's three configuration files."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    norm_eps: float
    rope_theta: float
    latent_channels: int
    latent_patch: int
    """Latent pixels that a token is wide and high."""
    latent_side: int
    """Most tokens of a painted picture in a row or column."""
    vit_width: int
    vit_intermediate_size: int
    vit_layers: int
    vit_heads: int
    vit_patch: int
    """Pixels that a patch is wide and high."""
    vit_positions: int
    vit_eps: float
    vit_side: int
    """Most patches of a picture that is looked at in a row or column."""
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def token_width(self) -> int:
        """Numbers of a latent token."""
        return self.latent_channels * self.latent_patch**2


@dataclass(frozen=True)
class Written:
    """Result of a language model's forward."""

    logits: Tensor
    """(B, N, vocabulary)."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (scaled * self.weight.float()).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Attention(nn.Module):
    """Projections of both experts; who sees whom is the caller's."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self._dim = dim
        for suffix in ("", "_moe_gen"):
            setattr(self, f"q_proj{suffix}", nn.Linear(width, config.num_heads * dim))
            setattr(self, f"k_proj{suffix}", nn.Linear(width, config.num_key_heads * dim))
            setattr(self, f"v_proj{suffix}", nn.Linear(width, config.num_key_heads * dim))
            setattr(self, f"o_proj{suffix}", nn.Linear(config.num_heads * dim, width, bias=False))
            setattr(self, f"q_norm{suffix}", RMSNorm(dim, config.norm_eps))
            setattr(self, f"k_norm{suffix}", RMSNorm(dim, config.norm_eps))

    def project(self, x: Tensor, rotary: Tensor, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, heads, N, D) of tokens (B, N, width) of one expert."""
        query, key, value = (
            getattr(self, f"{name}_proj{suffix}")(x).unflatten(-1, (-1, self._dim)).transpose(1, 2) for name in "qkv"
        )
        query = rotate(getattr(self, f"q_norm{suffix}")(query.float()), rotary)
        key = rotate(getattr(self, f"k_norm{suffix}")(key.float()), rotary)
        return query.to(x.dtype), key.to(x.dtype), value

    def output(self, attended: Tensor, suffix: str) -> Tensor:
        """(B, N, width) of (B, heads, N, D)."""
        projected: Tensor = getattr(self, f"o_proj{suffix}")(attended.transpose(1, 2).flatten(2))
        return projected


class BagelLayer(nn.Module):
    """Layer with both experts."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.mlp_moe_gen = MLP(config.hidden_size, config.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            for suffix in ("", "_moe_gen"):
                setattr(self, f"{name}{suffix}", RMSNorm(config.hidden_size, config.norm_eps))

    def forward(
        self, text: Tensor, latents: Tensor | None, rotary: Sequence[Tensor], attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of the understanding expert (B, N, width), and those that are painted (B, T, width) if there are any;
        `rotary` of each kind, (2, B, 1, tokens, D)."""
        streams = [("", text)] if latents is None else [("", text), ("_moe_gen", latents)]
        projected = [
            self.self_attn.project(getattr(self, f"input_layernorm{suffix}")(x), angles, suffix)
            for (suffix, x), angles in zip(streams, rotary, strict=True)
        ]
        query, key, value = (torch.cat(parts, dim=2) for parts in zip(*projected, strict=True))
        attended = torch.split(attend(query, key, value), [x.shape[1] for _, x in streams], dim=2)
        output = []
        for (suffix, x), stream in zip(streams, attended, strict=True):
            after = x + self.self_attn.output(stream, suffix)
            normed = getattr(self, f"post_attention_layernorm{suffix}")(after)
            output.append(after + getattr(self, f"mlp{suffix}")(normed))
        return output[0], output[1] if len(output) > 1 else None


class Qwen2Model(nn.Module):
    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BagelLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.norm_eps)


class LanguageModel(nn.Module):
    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class PictureLayer(nn.Module):
    """A layer of SigLIP."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width, inner = config.vit_width, config.vit_intermediate_size
        self._heads = config.vit_heads
        self.layer_norm1 = nn.LayerNorm(width, config.vit_eps)
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(width, width) for name in ("q", "k", "v", "out")})
        self.layer_norm2 = nn.LayerNorm(width, config.vit_eps)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """(n, width) of the patches of several pictures; each sees those of its picture."""
        normed = self.layer_norm1(x)
        query, key, value = (
            self.self_attn[f"{name}_proj"](normed).unflatten(-1, (self._heads, -1)).transpose(0, 1) for name in "qkv"
        )
        parts = zip(*(part.split(list(sizes), dim=1) for part in (query, key, value)), strict=True)
        attended = torch.cat([F.scaled_dot_product_attention(*(qkv[None] for qkv in part))[0] for part in parts], dim=1)
        x = x + self.self_attn["out_proj"](attended.transpose(0, 1).flatten(1))
        inner = F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh")
        output: Tensor = x + self.mlp["fc2"](inner)
        return output


class PictureEncoder(nn.Module):
    """SigLIP's encoder of patches (vit_model.vision_model in the checkpoint)."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width = config.vit_width
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Linear(3 * config.vit_patch**2, width),
                "position_embedding": nn.Embedding(config.vit_positions, width),
            }
        )
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(PictureLayer(config) for _ in range(config.vit_layers))})
        self.post_layernorm = nn.LayerNorm(width, config.vit_eps)

    def forward(self, patches: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
        """(n, width) of patches (n, 3 p²), each row by row and color last, at flattened `places` (n,)."""
        x = self.embeddings["patch_embedding"](patches) + self.embeddings["position_embedding"](places)
        layers: Any = self.encoder["layers"]
        for layer in layers:
            x = layer(x, sizes)
        output: Tensor = self.post_layernorm(x)
        return output


class GridEmbedding(nn.Module):
    """Sines and cosines of a token's column and row. Published with the weights, and never trained."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.register_buffer("pos_embed", grid_waves(side, width))

    def forward(self, places: Tensor) -> Tensor:
        table: Any = self.pos_embed
        rows: Tensor = table[places]
        return rows


class Bagel(PeftAdapterMixin, nn.Module):  # type: ignore[misc]
    """See the module."""

    _no_split_modules: ClassVar[list[str]] = ["BagelLayer", "PictureLayer"]

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = LanguageModel(config)
        self.time_embedder = TimeEmbedding(config.hidden_size, nn.SiLU())
        self.vae2llm = nn.Linear(config.token_width, config.hidden_size)
        self.llm2vae = nn.Linear(config.hidden_size, config.token_width)
        self.latent_pos_embed = GridEmbedding(config.latent_side, config.hidden_size)
        self.vit_model = nn.ModuleDict({"vision_model": PictureEncoder(config)})
        self.connector = nn.ModuleDict(
            {
                "fc1": nn.Linear(config.vit_width, config.hidden_size),
                "fc2": nn.Linear(config.hidden_size, config.hidden_size),
            }
        )
        self.vit_pos_embed = GridEmbedding(config.vit_side, config.hidden_size)

    @property
    def lm_head(self) -> nn.Linear:
        return self.language_model.lm_head

    @property
    def device(self) -> torch.device:
        return self.vae2llm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vae2llm.weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        """Gives the table of token embeddings, as models of transformers do."""
        return self.language_model.model.embed_tokens

    def forward(self, latents: Tensor | None = None, **inputs: Any) -> Any:
        """`paint` where there are latents, else the logits of `write`."""
        if latents is not None:
            return self.paint(latents, **inputs)
        inputs.pop("use_cache", None)
        return Written(self.language_model.lm_head(self.write(**inputs)))

    def paint(
        self, latents: Tensor, *, sigma: Tensor, token_ids: Tensor, mask: Tensor | None, markers: Tensor, places: Tensor
    ) -> Tensor:
        """Velocity (B, T, token_width) of latents (B, T, token_width).

        Args:
            latents: in the model's dtype.
            sigma: (B,) float32.
            token_ids: (B, L) int64, right-padded; L may be 0.
            mask: (B, L) bool, False where padded; None: nothing is.
            markers: (2,) int64, the tokens that begin and end a picture.
            places: (T,) int64, the latents' places in the grid, row · latent_side + column.
        """
        model = self.language_model.model
        count, length = token_ids.shape
        lengths = torch.full((count,), length, device=latents.device) if mask is None else mask.sum(-1)
        text = model.embed_tokens(torch.cat([token_ids, markers.expand(count, 2)], dim=1))
        tokens: Tensor = self.vae2llm(latents) + self.time_embedder(sigma)[:, None]
        tokens = tokens + self.latent_pos_embed(places).to(tokens.dtype)
        positions_2d = torch.arange(length, device=latents.device).expand(count, -1)
        after = lengths[:, None]
        rotary = (
            self._rotary(torch.cat([positions_2d, after.expand(-1, 2)], dim=1)),
            self._rotary(after.expand(-1, tokens.shape[1])),
        )
        attend = _Painting(length, None if mask is None else mask)
        painted: Tensor | None = tokens
        for layer in model.layers:
            text, painted = layer(text, painted, rotary, attend)
        velocity: Tensor = self.llm2vae(model.norm_moe_gen(painted))
        return velocity

    def write(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        past_key_values: Any = None,
        lengths: Sequence[int] | None = None,
        pictures: Sequence[Sequence[int]] | None = None,
        patches: Tensor | None = None,
        patch_places: Tensor | None = None,
        patch_tokens: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states (B, N, width).

        Args:
            input_ids: (B, N) int64. B is 1 where sequences are packed.
            position_ids: (B, N).
            past_key_values: a cache of transformers that keys and values are added to; `lengths` of one sequence then,
                or none and N is 1.
            lengths: tokens of each packed sequence; None: each row continues what the cache holds.
            pictures: of each sequence the tokens of its pictures, which come first, one after the other.
            patches: (n, 3 p²) of all pictures, in the model's dtype.
            patch_places: (n,) int64, in the grid, row · vit_side + column.
            patch_tokens: (n,) int64, the patches' places in the row.
        """
        model = self.language_model.model
        hidden = model.embed_tokens(input_ids)
        if patches is not None:
            assert pictures is not None, "pictures have patches"
            assert patch_places is not None, "patches have places"
            sizes = [count - 2 for counts in pictures for count in counts]  # without the tokens around a picture
            looked = self._look(patches, patch_places, sizes)
            hidden = hidden.index_copy(1, patch_tokens, looked[None].to(hidden.dtype))
        rotary = (self._rotary(position_ids),)
        for number, layer in enumerate(model.layers):
            attend = _Writing(number, past_key_values, lengths, pictures)
            hidden, _ = layer(hidden, None, rotary, attend)
        normed: Tensor = model.norm(hidden)
        return normed

    def _look(self, patches: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
        """(n, hidden_size) of the patches of pictures with these numbers of them."""
        seen = self.vit_model["vision_model"](patches, places, sizes)
        inner = F.gelu(self.connector["fc1"](seen), approximate="tanh")
        looked: Tensor = self.connector["fc2"](inner)
        shown: Tensor = looked + self.vit_pos_embed(places).to(looked.dtype)
        return shown

    def _rotary(self, positions: Tensor) -> Tensor:
        """(2, B, 1, N, D) float32: cosines and sines of positions (B, N)."""
        dim = self.config.head_dim
        even = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() / self.config.rope_theta ** (even / dim)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.stack([angles.cos(), angles.sin()])[:, :, None]


@dataclass(frozen=True)
class _Painting:
    """Text sees the text before it; the picture sees the text and itself."""

    length: int
    """Tokens of the text, padding included."""
    mask: Tensor | None
    """(B, L) bool."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.length
        keys = None if self.mask is None else F.pad(self.mask, (0, key.shape[2] - end), value=True)[:, None, None]
        picture = sdpa(query[:, :, end:], key, value, mask=keys)
        if not end:
            return picture
        text = sdpa(query[:, :, :end], key[:, :, :end], value[:, :, :end], is_causal=True)
        return torch.cat([text, picture], dim=2)


@dataclass(frozen=True)
class _Writing:
    """See `Bagel.write`."""

    layer: int
    cache: Any
    lengths: Sequence[int] | None
    pictures: Sequence[Sequence[int]] | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.cache is not None:
            key, value = self.cache.update(key, value, self.layer)
        if self.lengths is None:
            return sdpa(query, key, value)
        sizes = list(self.lengths)
        parts = zip(*(torch.split(part, sizes, dim=2) for part in (query, key, value)), strict=True)
        pictures = self.pictures or [()] * len(self.lengths)
        return torch.cat([self._one(part, spans) for part, spans in zip(parts, pictures, strict=True)], dim=2)

    def _one(self, part: tuple[Tensor, ...], pictures: Sequence[int]) -> Tensor:
        query, key, value = part
        if not pictures:
            return sdpa(query, key, value, is_causal=True)
        count = query.shape[2]
        mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        start = 0
        for size in pictures:
            mask[start : start + size, start : start + size] = True
            start += size
        return sdpa(query, key, value, mask=mask)


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Scaled dot-product attention whose keys may have fewer heads."""
    attended: Tensor = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, N, D) float32, halves of a head as the two parts."""
    first, second = x.chunk(2, dim=-1)
    turned: Tensor = x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]
    return turned


def grid_waves(side: int, width: int) -> Tensor:
    """(side², width) float32: sines and cosines of the column in the first half, of the row in the second."""
    quarter = width // 4
    frequencies = 1.0 / MAX_PERIOD ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    columns = waves.expand(side, side, -1)
    rows = waves[:, None].expand(side, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).float()
