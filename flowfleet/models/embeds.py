"""Encoded prompts: a transformer's inputs besides latents and noise level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptEmbeds:
    """Encoded prompts, right-padded to one width with zero vectors."""

    embeds: Tensor
    """(B, L, D) in the text encoder's dtype."""
    mask: Tensor
    """(B, L) bool, False where padded."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs that a family needs, by name, (B, ...) each: pooled embeddings, latents of condition images."""
    has_padding: bool | None = None
    """True if any token is padding. Computed once here if not given, because asking a device means to wait for it."""
    half_widths: tuple[int, int] | None = None
    """Tokens of each row of the first half and of the second, where a forward of both branches of guidance pads one of
    them: see `branches.stacked`."""

    def __post_init__(self) -> None:
        if self.embeds.ndim != 3 or self.embeds.shape[:2] != self.mask.shape or self.mask.dtype != torch.bool:
            shapes = f"{tuple(self.embeds.shape)} and {tuple(self.mask.shape)} {self.mask.dtype}"
            raise ValueError(f"need embeds (B, L, D) and a bool mask (B, L), but got {shapes}")
        for name, extra in self.extras.items():
            if len(extra) != len(self.embeds):
                raise ValueError(f"{name} has {len(extra)} rows, but there are {len(self.embeds)} prompts")
        if self.has_padding is None:
            object.__setattr__(self, "has_padding", not bool(self.mask.all()))

    @classmethod
    def whole(cls, embeds: Tensor, extras: Mapping[str, Tensor] | None = None) -> "PromptEmbeds":
        """Prompts whose tokens all count."""
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return cls(embeds, mask, extras or {}, has_padding=False)

    def __len__(self) -> int:
        return len(self.embeds)

    def repeat(self, count: int) -> "PromptEmbeds":
        """Repeats each prompt `count` times in a row: (B * count, L, D), as a group of samples needs it."""
        embeds, mask = self.embeds.repeat_interleave(count, 0), self.mask.repeat_interleave(count, 0)
        extras = {name: extra.repeat_interleave(count, 0) for name, extra in self.extras.items()}
        return PromptEmbeds(embeds, mask, extras, self.has_padding)

    def rows(self, count: int) -> "PromptEmbeds":
        """`count` rows: these, or the only one repeated. Raises ValueError otherwise."""
        if len(self) == count:
            return self
        if len(self) == 1:
            return self.repeat(count)
        raise ValueError(f"need prompt embeds of 1 or {count} rows, but got {len(self)}")

    def select(self, rows: Tensor | Sequence[int]) -> "PromptEmbeds":
        """The given rows, in that order; rows may repeat."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.embeds.device)
        extras = {name: extra[index] for name, extra in self.extras.items()}
        has_padding = None if self.has_padding else False
        return PromptEmbeds(self.embeds[index], self.mask[index], extras, has_padding)

    def trimmed(self) -> "PromptEmbeds":
        """Without the tokens that are padding in every row. With padding it asks the device once."""
        if not self.has_padding:
            return self
        width = int(self.mask.any(0).sum())
        return PromptEmbeds(self.embeds[:, :width].contiguous(), self.mask[:, :width].contiguous(), self.extras)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "PromptEmbeds":
        """The same prompts on `device`, embeds in `dtype` if given."""
        extras = {name: extra.to(device) for name, extra in self.extras.items()}
        return replace(self, embeds=self.embeds.to(device, dtype), mask=self.mask.to(device), extras=extras)


def concat_embeds(parts: Sequence[PromptEmbeds]) -> PromptEmbeds:
    """Joins `parts` to one batch, in order, padded to the widest. Raises ValueError for extras that do not fit."""
    width = max(part.embeds.shape[1] for part in parts)
    padded = [pad_embeds(part, width) for part in parts]
    embeds, mask = torch.cat([part.embeds for part in padded]), torch.cat([part.mask for part in padded])
    return PromptEmbeds(embeds, mask, _concat_extras(parts), any(part.has_padding for part in padded))


def pad_embeds(prompts: PromptEmbeds, width: int) -> PromptEmbeds:
    """Right-pads to `width` tokens. Raises ValueError if the prompts are wider."""
    missing = width - prompts.embeds.shape[1]
    if missing < 0:
        raise ValueError(f"prompts of {prompts.embeds.shape[1]} tokens do not fit the padded width of {width}")
    if missing == 0:
        return prompts
    pad = torch.nn.functional.pad
    mask = pad(prompts.mask, (0, missing), value=False)
    return PromptEmbeds(pad(prompts.embeds, (0, 0, 0, missing)), mask, prompts.extras, has_padding=True)


def pad_to_multiple(prompts: PromptEmbeds, multiple: int) -> PromptEmbeds:
    """Right-pads to the next multiple of so many tokens."""
    return pad_embeds(prompts, -(-prompts.embeds.shape[1] // multiple) * multiple)


def _concat_extras(parts: Sequence[PromptEmbeds]) -> dict[str, Tensor]:
    extras = {}
    if len({frozenset(part.extras) for part in parts}) > 1:
        names = sorted({", ".join(sorted(part.extras)) or "nothing" for part in parts})
        raise ValueError(
            f"prompts in one batch must have the same extras, but they have {'; '.join(names)}: give condition images "
            "of one number"
        )
    for name in parts[0].extras:
        tensors = [part.extras[name] for part in parts]
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
            raise ValueError(
                f"{name} of prompts in one batch must have one shape, but they have {shapes}: give condition images of "
                "one number and one aspect ratio"
            )
        extras[name] = torch.cat(tensors)
    return extras
