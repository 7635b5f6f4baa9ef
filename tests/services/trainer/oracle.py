"""Training steps by plain PyTorch: one process, no FSDP, all rows of an update at once, every formula written out.

Nothing of `services/trainer` computes here but the plan of which sample is in which update. Old policies and references
are copies of the whole model.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.optimization import get_scheduler
from torch import Tensor

from flowfleet.algorithms.settings import LikelihoodSettings, NoiseLevelSettings, OldPolicySettings
from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.trajectories import EmbedsBlob, FinalLatents, Trajectory
from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.registry import adapter_for
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.seeds import derive_seed
from flowfleet.weights.lora import install_lora
from flowfleet.weights.weights import full_parameters
from services.trainer.model.engine import lora_spec
from services.trainer.step.batches import plan_passes
from services.trainer.step.requests import check_request, pairs_of

Step = tuple[Tensor, Tensor, float, float]
"""Log-probs (B,), means (B, ...), the step's std and its sigma' - sigma."""


class Oracle:
    """The job's model; `train` is one step."""

    def __init__(self, spec: JobSpec, files: SyncBlobs) -> None:
        torch.set_num_threads(1)
        self.spec, self.files = spec, files
        self.part: Any = spec.algorithm
        self._likelihood = spec.algorithm.of(LikelihoodSettings).likelihood
        self._num_levels = spec.algorithm.of(NoiseLevelSettings).num_noise_levels
        family = adapter_for(spec.model.path)
        self.adapter = family.load(spec.model.path, dtype=torch.float32, components=("transformer",))
        if spec.trainer.mode == "lora":
            self.trained: dict[str, Tensor] = dict(
                install_lora(self.adapter.experts, lora_spec(spec), derive_seed(spec.seed, "lora"))
            )
        else:
            for expert in self.adapter.experts.values():
                expert.requires_grad_(True)
            self.trained = dict(full_parameters(self.adapter.experts))
        self.num_updates = 0
        self.reference, self.old = copy.deepcopy(self.adapter), copy.deepcopy(self.adapter)
        part = spec.trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=part.lr, betas=part.betas, eps=part.eps, weight_decay=part.weight_decay
        )
        self.scheduler = get_scheduler(
            part.lr_schedule if part.lr_schedule != "constant" else "constant_with_warmup",
            self.optimizer,
            num_warmup_steps=part.warmup_updates,
            num_training_steps=spec.schedule.steps * spec.trainer.updates_per_step * spec.trainer.passes,
        )
        self.schedule = self.adapter.schedule(spec.rollout.num_inference_steps, spec.rollout.size, spec.rollout.shift)

    def state(self) -> dict[str, Tensor]:
        """What is trained, by published name."""
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def train(self, request: TrainStepRequest) -> list[float]:
        """The loss of each update."""
        spec, losses = self.spec, []
        if spec.loss.kind == "policy":
            self.old = copy.deepcopy(self.adapter)
        plan = plan_passes(check_request(request, spec), spec, request.step, 1, pairs=pairs_of(request, spec))
        for place, (number, update) in enumerate((n, update) for part in plan for n, update in enumerate(part)):
            rows = [row for batch in update.by_rank[0] for row in batch.rows]
            past = place // len(plan[0]) * self._num_levels
            loss = self._loss([request.samples[row] for row in rows], request.step, number, past)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.trained.values(), spec.trainer.optimizer.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.num_updates += 1
            losses.append(float(loss))
        self._follow()
        return losses

    def _follow(self) -> None:
        part = self.spec.algorithm.of(OldPolicySettings).old_policy
        decay = min(part.max, part.rate * max(0, self.num_updates - part.delay))
        for expert, old in zip(self.adapter.experts.values(), self.old.experts.values(), strict=True):
            for parameter, kept in zip(expert.parameters(), old.parameters(), strict=True):
                kept.data = decay * kept.data + (1 - decay) * parameter.data

    def _loss(self, items: Sequence[TrainSample], step: int, update: int, past: int) -> Tensor:
        """Mean over samples and rounds. `past`: rounds of noise drawn in earlier passes."""
        if self.spec.loss.kind == "policy":
            steps = items[0].sample.sde_steps
            return torch.stack([self._policy_loss(items, steps, k) for k in range(len(steps))]).mean()
        rounds = range(past, past + self._num_levels)
        return torch.stack([self._matching_loss(items, step, update, k) for k in rounds]).mean()

    # Policy losses ----------------------------------------------------------------------------------------------------

    def _policy_loss(self, items: Sequence[TrainSample], steps: Sequence[int], k: int) -> Tensor:
        """(B,) of the k-th of the noisy steps, which are the same in every training step."""
        step = steps[k]
        advantages = torch.tensor([item.advantage for item in items])
        log_prob, mean, std, dt = self._step(self.adapter, items, k, step)
        with torch.no_grad():
            old_log_prob, old_mean, _, _ = self._step(self.old, items, k, step)
            _, reference, _, _ = self._step(self.reference, items, k, step)
        part, log_ratio = self.part, log_prob - old_log_prob
        drift = _mean(((mean - old_mean) ** 2) / (2 * std**2))
        if part.loss == "flow_dppo":
            moves_away = advantages * log_ratio > 0
            loss = torch.where((drift >= part.kl_threshold) & moves_away, 0.0, -advantages * log_ratio.exp())
        else:
            if part.loss == "grpo_guard":
                log_ratio = (log_ratio + drift) * std
            ratio, clip = log_ratio.exp(), part.clip_range
            loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
            loss = loss / -dt if part.loss == "grpo_guard" else loss
        if part.step_weights == "noise":
            stds = {number: self._step(self.old, items, place, number)[2] for place, number in enumerate(steps)}
            loss = loss * stds[step] * len(stds) / sum(stds.values())
        ties = torch.tensor([0.0 if item.without_kl else 1.0 for item in items])
        return loss + part.kl_coef * ties * _mean((mean - reference) ** 2 / (2 * std**2))

    def _step(self, model: ModelAdapter, items: Sequence[TrainSample], k: int, step: int) -> Step:
        """The step type `sde`."""
        paths = [Trajectory.from_bytes(self.files.get(item.sample.trajectory)) for item in items]
        x, x_next = (torch.stack([path.pair(k)[side] for path in paths]) for side in (0, 1))
        sigmas = self.schedule.sigmas.double().tolist()
        s, dt, eta = sigmas[step], sigmas[step + 1] - sigmas[step], self.spec.rollout.noise.eta
        variance = eta**2 * s / (1 - (sigmas[1] if s == 1 else s))
        v = self._velocity(model, x, self.schedule.timesteps[step], items)
        mean = x * (1 + variance * dt / (2 * s)) + v * (1 + variance * (1 - s) / (2 * s)) * dt
        std = (variance * -dt) ** 0.5
        normal: Any = torch.distributions.Normal(mean, std)
        log_prob: Tensor = normal.log_prob(x_next)
        return _mean(log_prob), mean, std, dt

    # Matching losses --------------------------------------------------------------------------------------------------

    def _matching_loss(self, items: Sequence[TrainSample], step: int, update: int, k: int) -> Tensor:
        """(B,), or a pair's (B / 2,)."""
        part, shape = self.part, self.adapter.latent_shape(self.spec.rollout.size)
        clean = torch.stack([FinalLatents.from_bytes(self.files.get(item.sample.trajectory)).latents for item in items])
        numbers = {"dpo": [item.pair for item in items], "dgpo": [0] * len(items)}
        own = numbers.get(part.loss, [item.sample.id.index for item in items])
        places = [(item.sample.id.group, number) for item, number in zip(items, own, strict=True)]
        seeds = [derive_seed(self.spec.seed, "match/noise", step, *place, k) for place in places]
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        flat = torch.tensor([self._sigma(place, step, update, k) for place in places], dtype=torch.float32)
        sigma = flat.reshape(-1, *[1] * len(shape))
        noisy = (1 - sigma) * clean + sigma * noise
        velocities = [self._velocity(self.adapter, noisy, 1000 * flat, items)]
        with torch.no_grad():
            velocities += [self._velocity(model, noisy, 1000 * flat, items) for model in (self.old, self.reference)]
        if part.loss == "dpo":
            current, _, reference = (_mean((velocity - (noise - clean)) ** 2) for velocity in velocities)
            excess = current - reference
            return -torch.log(torch.sigmoid(-0.5 * part.beta * (excess[0::2] - excess[1::2])))
        if part.loss != "diffusion_nft":
            return self._by_errors(items, velocities, noise - clean, flat)
        return self._nft(items, [noisy - sigma * velocity for velocity in velocities], clean, velocities)

    def _nft(
        self, items: Sequence[TrainSample], predicted: Sequence[Tensor], clean: Tensor, velocities: Sequence[Tensor]
    ) -> Tensor:
        """`predicted`: x0 by the current and the old policy; a mixture's x0 is the mixture of both."""
        part, (current, old, _) = self.part, predicted
        share = torch.tensor([min(max(item.advantage, -5), 5) / 10 + 0.5 for item in items])
        ties = torch.tensor([0.0 if item.without_kl else 1.0 for item in items])
        total = part.kl_coef * ties * _mean((velocities[0] - velocities[2]) ** 2)
        for weight, beta in ((share, part.beta), (1 - share, -part.beta)):
            mixture = beta * current + (1 - beta) * old
            distance = _mean((mixture.detach() - clean).abs()).clamp(min=1e-5)
            total = total + 5 / part.beta * weight * _mean((mixture - clean) ** 2) / distance
        return total

    def _by_errors(
        self, items: Sequence[TrainSample], velocities: Sequence[Tensor], target: Tensor, sigma: Tensor
    ) -> Tensor:
        """Losses on the matching errors of the current policy, the old one and the reference."""
        part, groups = self.part, torch.tensor([item.sample.id.group for item in items])
        advantages = torch.tensor([item.advantage for item in items])
        error, old, reference = (self._error(velocity - target, sigma) for velocity in velocities)
        ties = torch.tensor([0.0 if item.without_kl else 1.0 for item in items])
        tie, kl = ties * _mean((velocities[0] - velocities[2]) ** 2), self.spec.kl.kl_coef
        if part.loss == "awm":
            scaled, ratio = advantages.clamp(-5, 5) / 5, (old - error).exp()
            loss = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(1 - part.clip_range, 1 + part.clip_range))
            return loss + _mean((velocities[0] - velocities[1]) ** 2) + kl * tie
        if part.loss == "elbo_pg":
            log_ratio = (old - error).detach()
            return log_ratio.exp() * (advantages / part.beta - log_ratio) * error + kl * tie
        whole = (groups[:, None] == groups).to(error)
        whole = whole / whole.sum(dim=1, keepdim=True)  # (B, B): times values, the mean of each row's group
        if part.loss == "dgpo":
            weight = torch.sigmoid(part.beta * whole @ (advantages * (error - reference))).detach()
            ratio = (old - error).exp()
            is_cut = torch.where(advantages > 0, ratio > 1 + part.clip_range, ratio < 1 - part.clip_range)
            return weight * advantages * torch.where(is_cut, error.detach(), error) + kl * tie
        share, own = advantages.clamp(-5, 5) / 10 + 0.5, old - error
        gap = part.beta * (own - whole @ own.detach()) - (share - whole @ share)
        return 5 / part.beta * gap**2 + (1e-4 + share * (kl - 1e-4)) * tie

    def _error(self, residual: Tensor, sigma: Tensor) -> Tensor:
        """(B,) by `algorithm.likelihood`, of a velocity's errors."""
        if self._likelihood == "huber":
            return sigma / 0.25 * ((_mean(residual**2) + 1e-10) ** 0.25 - 1e-10**0.25)
        if self._likelihood == "normalized_x0":
            residual = sigma.reshape(-1, *[1] * (residual.ndim - 1)) * residual
        square = _mean(residual**2)
        return square if self._likelihood == "velocity" else square / _mean(residual.detach().abs()).clamp(min=1e-5)

    def _sigma(self, place: tuple[int, int], step: int, update: int, k: int) -> float:
        """The noise level of a round, among all or those of the expert that was drawn."""
        part, rollout, seed = self.part, self.spec.rollout, self.spec.seed
        boundary = self.adapter.boundary if len(self.adapter.experts) == 2 else None
        if part.sigma_sampling == "schedule":
            return self._listed_sigma(place, step, update, k, boundary)
        share = derive_seed(seed, "match/sigma", step, *place, k) / 2**63
        fine = self.adapter.schedule(1000, rollout.size, rollout.shift).sigmas.double().flip(0).tolist()
        grid = fine if part.sigma_sampling == "shifted" else [part.sigma_low, part.sigma_high]
        us = [number / (len(grid) - 1) for number in range(len(grid))]
        start, end, low, high = 0.0, 1.0, part.sigma_low, part.sigma_high
        if boundary is not None and low < boundary < high:
            parting = float(np.interp(boundary, grid, us))
            if derive_seed(seed, "match/side", step, update, k) / 2**63 < parting:
                end, high = parting, boundary - 1e-6
            else:
                start, low = parting, boundary + 1e-6
        sigma = float(np.interp(start + (end - start) * share, us, grid))
        return min(max(sigma, low), high)

    def _listed_sigma(self, place: tuple[int, int], step: int, update: int, k: int, boundary: float | None) -> float:
        """Round k of a pass takes the side of the k-th of all shuffled levels, and there the sample's next one."""
        number, k = divmod(k, self._num_levels)

        def shuffled(purpose: str, count: int, *path: int) -> list[int]:
            seed = derive_seed(self.spec.seed, f"match/{purpose}", step, *path)
            order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
            return order

        levels: list[float] = self.schedule.sigmas[:-1].tolist()
        sides = [boundary is not None and level >= boundary for level in levels]
        order = shuffled("sides", len(levels), update, number)
        drawn = [sides[index] for index in order]
        own = [level for level, side in zip(levels, sides, strict=True) if side == drawn[k]]
        return own[shuffled("order", len(own), *place, number)[drawn[:k].count(drawn[k])]]

    # Both -------------------------------------------------------------------------------------------------------------

    def _velocity(self, model: ModelAdapter, x: Tensor, timestep: Tensor, items: Sequence[TrainSample]) -> Tensor:
        rollout = self.spec.rollout
        prompts = self._prompts([item.sample.prompt_embeds for item in items])
        negative = self._prompts([item.sample.negative_embeds for item in items]) if rollout.guidance.is_on else None
        return model.velocity(x, timestep, prompts, size=rollout.size, guidance=rollout.guidance, negative=negative)

    def _prompts(self, refs: Sequence[BlobRef]) -> PromptEmbeds:
        return concat_embeds([EmbedsBlob.from_bytes(self.files.get(ref)).row() for ref in refs])


def _mean(values: Tensor) -> Tensor:
    """(B,) over all but the first dimension."""
    return values.flatten(1).mean(dim=1)
