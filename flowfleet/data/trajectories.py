"""Safetensors blobs of a sampled trajectory, for trainers.

A blob's metadata names its format, so that one kind is never taken for another. Whatever does not fit is DataLoss.
Where the noisy steps follow each other, each step's result is the next step's input and is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from flowfleet.errors import DataLoss
from flowfleet.models.embeds import PromptEmbeds

_TRAJECTORY: Final = "flowfleet.trajectory.v1"
_FINAL: Final = "flowfleet.final.v1"
_EMBEDS: Final = "flowfleet.embeds.v2"
_EXTRA: Final = "extra."

T = TypeVar("T")


@dataclass(frozen=True)
class Trajectory:
    """The W steps of one sample at which noise entered, fp32 unless it says otherwise. ValueError when it does not
    fit."""

    latents: Tensor
    """(W, *latent): x before each step."""
    next_latents: Tensor
    """(W, *latent): x after each step."""
    log_probs: Tensor
    """(W,), or (W, P) of latents with parts; float64, or fp32 of a device without it: the rollout's own, means as
    `algorithms.sde` states."""
    sigmas: Tensor
    """(W,)"""
    sigmas_next: Tensor
    """(W,)"""
    timesteps: Tensor
    """(W,)"""
    step_indices: Tensor
    """(W,) int64, ascending."""

    def __post_init__(self) -> None:
        steps = self.num_steps
        check_tensor("step_indices", self.step_indices, (steps,), torch.int64)
        check_tensor("latents", self.latents, (steps, *self.latents.shape[1:]), torch.float32)
        check_tensor("next_latents", self.next_latents, tuple(self.latents.shape), torch.float32)
        check_tensor("log_probs", self.log_probs.double(), (steps, *self.log_probs.shape[1:2]), torch.float64)
        for name in ("sigmas", "sigmas_next", "timesteps"):
            check_tensor(name, getattr(self, name), (steps,), torch.float32)
        if steps == 0 or self.latents.dim() < 2:
            raise ValueError("a trajectory needs at least one step with a latent of at least one dimension")
        if self.step_indices[0] < 0 or not bool((self.step_indices.diff() > 0).all()):
            raise ValueError(f"step_indices must ascend from 0 or more: {self.step_indices.tolist()}")

    @property
    def num_steps(self) -> int:
        """W."""
        return self.step_indices.numel()

    def pair(self, k: int) -> tuple[Tensor, Tensor]:
        """x before and after the k-th noisy step (not the schedule's index), each (*latent)."""
        return self.latents[k], self.next_latents[k]

    def to_bytes(self) -> bytes:
        """safetensors; W + 1 latents when the steps form a chain, else W and W."""
        tensors = {
            name: getattr(self, name) for name in ("log_probs", "sigmas", "sigmas_next", "timesteps", "step_indices")
        }
        if _same_bits(self.next_latents[:-1], self.latents[1:]):
            tensors["chain"] = torch.cat([self.latents, self.next_latents[-1:]])
        else:
            tensors |= {"latents": self.latents, "next_latents": self.next_latents}
        return save_blob(tensors, _TRAJECTORY)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trajectory:
        """On the CPU. DataLoss when it is not a trajectory."""
        tensors = load_blob(data, _TRAJECTORY)
        chain = tensors.pop("chain", None)
        if chain is not None:
            tensors |= {"latents": chain[:-1], "next_latents": chain[1:]}
        return build(cls, tensors)


@dataclass(frozen=True)
class FinalLatents:
    """Latents at the end of sampling, before decoding."""

    latents: Tensor
    """(*latent) fp32."""

    def __post_init__(self) -> None:
        if self.latents.dim() < 1 or self.latents.dtype != torch.float32:
            raise ValueError(f"final latents must be float32, not {self.latents.dtype} {tuple(self.latents.shape)}")

    def to_bytes(self) -> bytes:
        """safetensors."""
        return save_blob({"latents": self.latents}, _FINAL)

    @classmethod
    def from_bytes(cls, data: bytes) -> FinalLatents:
        """On the CPU. DataLoss when it is not such a blob."""
        return build(cls, load_blob(data, _FINAL))


@dataclass(frozen=True)
class EmbedsBlob:
    """Embeddings of one prompt, padded as the rollout's batch used them, so that the forward repeats exactly."""

    embeds: Tensor
    """(L, D), any floating dtype, kept."""
    mask: Tensor
    """(L,) bool: True where the prompt has a token."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs that the family needs, by name."""

    def __post_init__(self) -> None:
        if self.embeds.dim() != 2 or not self.embeds.is_floating_point():
            raise ValueError(f"embeds must be floating (L, D), not {self.embeds.dtype} {tuple(self.embeds.shape)}")
        check_tensor("mask", self.mask, (len(self.embeds),), torch.bool)

    def to_bytes(self) -> bytes:
        """safetensors."""
        extras = {_EXTRA + name: tensor for name, tensor in self.extras.items()}
        return save_blob({"embeds": self.embeds, "mask": self.mask, **extras}, _EMBEDS)

    @classmethod
    def from_bytes(cls, data: bytes) -> EmbedsBlob:
        """On the CPU. DataLoss when it is not an embeds blob."""
        tensors = load_blob(data, _EMBEDS)
        extras = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_EXTRA)}
        named: dict[str, Any] = {"extras": {name.removeprefix(_EXTRA): tensor for name, tensor in extras.items()}}
        return build(cls, tensors | named)

    @classmethod
    def of_row(cls, prompts: PromptEmbeds) -> EmbedsBlob:
        """From the only row of `prompts`."""
        (embeds,), (mask,) = prompts.embeds, prompts.mask
        return cls(embeds, mask, {name: extra[0] for name, extra in prompts.extras.items()})

    def row(self) -> PromptEmbeds:
        """Returns the embeddings as a batch of one row."""
        extras = {name: extra[None] for name, extra in self.extras.items()}
        return PromptEmbeds(self.embeds[None], self.mask[None], extras)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Unlike `==`, tells 0.0 from -0.0 and finds a NaN equal to itself."""
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


def save_blob(tensors: dict[str, Tensor], kind: str) -> bytes:
    ready = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors.items()}
    return bytes(safetensors.torch.save(ready, metadata={"format": kind}))


def load_blob(data: bytes, kind: str) -> dict[str, Tensor]:
    actual = _kind(data)
    if actual != kind:
        raise DataLoss(f"expected a blob of format {kind}, found {actual}")
    try:
        return dict(safetensors.torch.load(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataLoss(f"not valid safetensors: {error}") from None


def _kind(data: bytes) -> str:
    """The `format` in the metadata: eight bytes of length (little-endian), then a JSON header."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return str(header["__metadata__"]["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"not a safetensors blob with a format in its metadata: {type(error).__name__}") from None


def build(cls: type[T], tensors: dict[str, Any]) -> T:
    try:
        return cls(**tensors)
    except (ValueError, TypeError, IndexError) as error:
        raise DataLoss(f"malformed {cls.__name__}: {error}") from None
