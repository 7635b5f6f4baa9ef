"""From predicted clean latents to the gradient of a job's rewards by them.

    latents ─► decode, without gradient ─► pixels ─► rewards ─► gradient by pixels
                                                                     │
    gradient by latents ◄─ decode again, a picture at a time ◄───────┘

So the activations of one picture's decoding are in memory, and none of the transformer's. What was asked once for a
step is read again (store.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet.algorithms.reward_gradient import Wish, with_words
from flowfleet.data.lineage import digest_of, follow
from flowfleet.job.spec import JobSpec
from flowfleet.proto.trainer_pb2 import GroupPrompt, TrainStepRequest
from flowfleet.rewards.failures import RewardUnavailable, at
from flowfleet.rewards.gradients import PixelInput, Pixels
from services.trainer.beats import Phase
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.gradients.client import GradientClient, Scored
from services.trainer.step.gradients.store import GradientStore, RowGradient


@dataclass(frozen=True)
class BatchGradient:
    """What rewards said of B rows."""

    gradient: Tensor
    """(B, *latent) float32 on the device; zeros for a row that no reward could score."""
    rewards: Tensor
    """(B,) float32: the wanted rewards' weighted sum; 0 for such a row."""
    missing: Tensor
    """(B,) float32: 1 for such a row."""


class RewardGradients:
    """Gradients of one training step on one rank."""

    def __init__(
        self,
        spec: JobSpec,
        decoder: Any,
        client: GradientClient,
        ranks: Ranks,
        request: TrainStepRequest,
        history: Mapping[int, str],
        directory: Path,
    ) -> None:
        """`decoder`: an adapter with the VAE. `history`: lineages by version. `directory`: the job's checkpoints'."""
        self._spec, self._decoder, self._client, self._ranks = spec, decoder, client, ranks
        self._request = request
        self._prompts: dict[int, GroupPrompt] = {prompt.group: prompt for prompt in request.prompts}
        lineage = follow(history, request) or f"unknown_{digest_of(request)}"
        self._store = GradientStore(directory, int(request.step), lineage)
        self._num_rows, self._num_missing = 0, 0
        self._why = ("another rank's log has the rewards' answers", "")
        """Why the last such row has no gradient, and the reward's name."""
        self._unkept: dict[str, RowGradient] = {}
        """Rows without a gradient, by name, until `settle`."""

    def of(self, rows: Sequence[int], k: int, image: Tensor, wishes: Sequence[Wish]) -> BatchGradient:
        """Gradient of what a loss wishes, for the step's samples `rows` in round k.

        Raises RewardUnavailable or RewardRefused where a reward gives no gradients, Full or Unavailable where there is
        no room for them or they cannot be kept.

        Args:
            image: (B, *latent) predicted clean latents, on the device.
            wishes: as the loss has them.
        """
        names = [self._name(row, k) for row in rows]
        known = [self._store.get(name) for name in names]
        new = [place for place, found in enumerate(known) if found is None]
        if new:
            with torch.no_grad():
                pixels = torch.cat([self._decoded(image[place : place + 1]) for place in new]).cpu()
            with self._ranks.beats.phase(Phase.OUTSIDE):
                found = self._asked([rows[place] for place in new], pixels, [_at(wish, new) for wish in wishes])
            for place, one in zip(new, found, strict=True):
                if one is None:
                    known[place] = none = RowGradient(torch.zeros(image.shape[1:]), 0.0, is_missing=True)
                    self._unkept[names[place]] = none
                    continue
                by_pixels, reward = one
                known[place] = row = RowGradient(self._by_latents(image[place : place + 1], by_pixels), reward)
                self._store.put(names[place], row)
                self._ranks.beats.beat()
        kept = [row for row in known if row is not None]
        missing = torch.tensor([float(row.is_missing) for row in kept])
        self._num_rows, self._num_missing = self._num_rows + len(kept), self._num_missing + int(missing.sum())
        return BatchGradient(
            gradient=torch.stack([row.gradient for row in kept]).to(image.device),
            rewards=torch.tensor([row.reward for row in kept], device=image.device),
            missing=missing.to(image.device),
        )

    def settle(self) -> None:
        """Collective, after all rows of the step. Keeps which of them have no gradient, so that a step that is applied
        again goes without them too. Where that is so for all of several rows, raises RewardUnavailable on every rank:
        then none is kept, and all are asked again."""
        counts = self._ranks.sum(torch.tensor([self._num_rows, self._num_missing], dtype=torch.float64))
        num_rows, num_missing = map(int, counts.tolist())
        if num_missing == num_rows > 1:
            why, name = self._why
            raise RewardUnavailable(f"{why}; so for all {num_rows} pictures of the step", name)
        with self._ranks.together():
            for name, row in self._unkept.items():
                self._store.put(name, row)

    def _name(self, row: int, k: int) -> str:
        sample = self._request.samples[row].sample.id
        return f"{sample.group}-{sample.index}-{k}"

    def _decoded(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self._decoder.pixels(latents, self._spec.rollout.size)
        self._ranks.beats.beat()
        return pixels

    def _by_latents(self, image: Tensor, by_pixels: Pixels) -> Tensor:
        """(*latent) float32 on the CPU: the gradient, decoded once more with gradient."""
        latents = image.detach().clone().requires_grad_()
        with torch.enable_grad():
            pixels: Tensor = self._decoder.pixels(latents, self._spec.rollout.size)
            target = torch.from_numpy(by_pixels)[None]
            scale = (
                2.0 ** math.frexp(float(target.abs().max()))[1]
            )  # keeps small ones in the range of a float16 decoder
            (gradient,) = torch.autograd.grad(pixels, latents, (target / scale).to(pixels))
        return gradient[0].float().cpu() * scale

    def _asked(self, rows: Sequence[int], pixels: Tensor, wishes: Sequence[Wish]) -> list[tuple[Pixels, float] | None]:
        """Asks the rewards. For each row the gradient (3, H, W) of its wishes' weighted sum, and that sum; None where a
        reward has an error for it."""
        sums: list[tuple[Pixels, float] | None] = [(torch.zeros_like(one).numpy(), 0.0) for one in pixels]
        for reward in self._request.gradient_rewards:
            weights = [self._prompt(row).weights.get(reward.name, 0.0) for row in rows]
            for wish in wishes:
                wanted = [place for place, weight in enumerate(weights) if weight and sums[place] is not None]
                inputs = [self._input(rows[place], place, pixels[place], wish.words) for place in wanted]
                answers = self._client.ask(reward, inputs) if inputs else {}
                for place in wanted:
                    answer = answers.get(str(place), "it is missing in the answer")
                    if isinstance(answer, str):
                        sums[place] = None
                        self._why = f"{at(reward.name, reward.service)}: {answer}", reward.name
                        continue
                    sums[place] = _added(sums[place], answer, wish, weights[place] * float(wish.factors[place]))
        return sums

    def _input(self, row: int, place: int, pixels: Tensor, words: str) -> PixelInput:
        prompt = self._prompt(row)
        return PixelInput(pixels.numpy(), with_words(words, prompt.text), dict(prompt.metadata), str(place))

    def _prompt(self, row: int) -> GroupPrompt:
        return self._prompts[self._request.samples[row].sample.id.group]


def _added(before: tuple[Pixels, float] | None, answer: Scored, wish: Wish, factor: float) -> tuple[Pixels, float]:
    assert before is not None
    gradient, reward = before
    if wish.ceiling is not None and answer.score >= wish.ceiling:
        return gradient, reward + factor * answer.score
    scaled: Pixels = torch.from_numpy(answer.gradient).mul(factor).add(torch.from_numpy(gradient)).numpy()
    return scaled, reward + factor * answer.score


def _at(wish: Wish, places: Sequence[int]) -> Wish:
    return Wish(wish.factors[list(places)], wish.words, wish.ceiling)
