"""From predicted clean latents to the gradient of a job's rewards by them.

    latents ─► decode, without gradient ─► pixels ─► rewards ─► gradient by pixels
                                                                     │
    gradient by latents ◄─ decode again, few at a time ◄─────────────┘

So the activations of decoding one large picture, or some small ones, are in memory, and none of the transformer's. What
was asked once for a step is read again (store.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet.algorithms.reward_gradient import Wish, with_words
from flowfleet.data.lineage import digest_of, follow
from flowfleet.job.spec import JobSpec
from flowfleet.proto.trainer_pb2 import GroupPrompt, TrainStepRequest
from flowfleet.rewards.failures import RewardUnavailable, at
from flowfleet.rewards.gradients import PixelInput, Pixels, num_decoded_together
from services.trainer.beats import Phase
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.gradients.client import GradientClient, Scored
from services.trainer.step.gradients.store import GradientStore, RowGradient


@dataclass(frozen=True)
class BatchGradient:
    """Rewards of B rows, and their gradient by the latents."""

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
        ids = [self._request.samples[row].sample.id for row in rows]
        names = [f"{one.group}-{one.index}-{k}" for one in ids]
        known = [self._store.get(name) for name in names]
        new = [index for index, row in enumerate(known) if row is None]
        if new:
            # rows go together whatever is known of them: a step that is applied again computes the same
            step = num_decoded_together(self._spec.rollout.size)
            parts = [range(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]
            parts = [part for part in parts if not set(part).isdisjoint(new)]
            with torch.no_grad():
                decoded = [self._decoded(image[part.start : part.stop]).cpu() for part in parts]
            pixels = dict(zip(chain.from_iterable(parts), chain.from_iterable(decoded), strict=True))
            asked = torch.stack([pixels[index] for index in new])
            with self._ranks.beats.phase(Phase.OUTSIDE):
                sums = self._asked(
                    [rows[index] for index in new], asked, [replace(wish, factors=wish.factors[new]) for wish in wishes]
                )
            answers = dict(zip(new, sums, strict=True))
            for part in parts:
                targets = torch.zeros(len(part), *asked.shape[1:])
                for target, answer in zip(targets, map(answers.get, part), strict=True):
                    if answer is not None:
                        target.copy_(torch.from_numpy(answer[0]))
                gradients = self._by_latents(image[part.start : part.stop], targets)
                for index, gradient in zip(part, gradients, strict=True):
                    if index in answers:
                        known[index] = self._row(names[index], gradient, answers[index])
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

    def _decoded(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self._decoder.pixels(latents, self._spec.rollout.size)
        self._ranks.beats.beat()
        return pixels

    def _by_latents(self, image: Tensor, by_pixels: Tensor) -> Tensor:
        """(B, *latent) float32 on the CPU: the gradients by pixels, decoded once more with gradient."""
        latents = image.detach().clone().requires_grad_()
        with torch.enable_grad():
            pixels: Tensor = self._decoder.pixels(latents, self._spec.rollout.size)
            # keeps small ones in the range of a float16 decoder, and its inverse finite
            scale = torch.exp2(torch.frexp(by_pixels.flatten(1).abs().amax(1)).exponent.clamp(min=-100).float())
            (gradient,) = torch.autograd.grad(pixels, latents, _times(by_pixels, 1 / scale).to(pixels))
        return _times(gradient.float().cpu(), scale)

    def _row(self, name: str, gradient: Tensor, answer: tuple[Pixels, float] | None) -> RowGradient:
        """Keeps what rewards said of a row; until `settle`, where they could not score it."""
        if answer is None:
            self._unkept[name] = row = RowGradient(torch.zeros_like(gradient), 0.0, is_missing=True)
        else:
            row = RowGradient(gradient, answer[1])
            self._store.put(name, row)
        return row

    def _asked(self, rows: Sequence[int], pixels: Tensor, wishes: Sequence[Wish]) -> list[tuple[Pixels, float] | None]:
        """Asks the rewards. For each row the gradient (3, H, W) of its wishes' weighted sum, and that sum; None where a
        reward has an error for it."""
        sums: list[tuple[Pixels, float] | None] = [(torch.zeros_like(picture).numpy(), 0.0) for picture in pixels]
        for reward in self._request.gradient_rewards:
            weights = [self._prompt(row).weights.get(reward.name, 0.0) for row in rows]
            for wish in wishes:
                wanted = [index for index, weight in enumerate(weights) if weight and sums[index] is not None]
                inputs = [self._input(rows[index], index, pixels[index], wish.words) for index in wanted]
                answers = self._client.ask(reward, inputs) if inputs else {}
                for index in wanted:
                    answer = answers.get(str(index), "it is missing in the answer")
                    if isinstance(answer, str):
                        sums[index] = None
                        self._why = f"{at(reward.name, reward.service)}: {answer}", reward.name
                        continue
                    sums[index] = _added(sums[index], answer, wish, weights[index] * float(wish.factors[index]))
        return sums

    def _input(self, row: int, number: int, pixels: Tensor, words: str) -> PixelInput:
        prompt = self._prompt(row)
        return PixelInput(pixels.numpy(), with_words(words, prompt.text), dict(prompt.metadata), str(number))

    def _prompt(self, row: int) -> GroupPrompt:
        return self._prompts[self._request.samples[row].sample.id.group]


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiplies each row (B, …) by its factor (B,)."""
    return rows * factors.view(-1, *[1] * (rows.dim() - 1))


def _added(before: tuple[Pixels, float] | None, answer: Scored, wish: Wish, factor: float) -> tuple[Pixels, float]:
    assert before is not None
    gradient, reward = before
    if wish.ceiling is not None and answer.score >= wish.ceiling:
        return gradient, reward + factor * answer.score
    scaled: Pixels = torch.from_numpy(answer.gradient).mul(factor).add(torch.from_numpy(gradient)).numpy()
    return scaled, reward + factor * answer.score
