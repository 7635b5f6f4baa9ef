"""Sampling of tokens with a sequence adapter. Synchronous.

A prompt goes through the model once for its whole group, without padding; its samples then continue with copies of its
keys and values. Rows of one prompt length share a batch, and a row that has ended leaves it. Every row draws one number
per token from its own seed, so the other rows of the batch do not matter. Afterwards the trainer's own function
computes the log-probs of each sequence alone, so that a trainer which does the same gets equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from flowfleet.data.sequences import StopReason, TokenTrajectory
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from services.rollout.engines.base import (
    NOT_FINITE,
    GeneratedBatch,
    GeneratedSample,
    GenerationRequest,
    SequenceSampling,
)
from services.rollout.engines.prompts import timed

EncodedPrompts = Mapping[int, EncodedPrompt]
"""Prompts by group."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Sequence to write."""

    group: int
    index: int
    seed: int


@dataclass(slots=True)
class _Written:
    """Tokens that a row has written so far."""

    token_ids: list[int]
    stop_reason: StopReason = "length"
    failure: str = ""


def batches(request: GenerationRequest, prompts: EncodedPrompts, max_batch: int) -> list[Sequence[TokenRow]]:
    """Cuts the rows, in (group, index) order, at `max_batch` and wherever the prompt's length changes."""
    chunks: list[list[TokenRow]] = []
    length = -1
    for group in request.groups:
        if len(prompts[group.group].token_ids) != length:
            length = len(prompts[group.group].token_ids)
            chunks.append([])
        for index, seed in zip(group.indices, group.seeds, strict=True):
            if len(chunks[-1]) == max_batch:
                chunks.append([])
            chunks[-1].append(TokenRow(group.group, index, seed))
    return [*filter(None, chunks)]


class TokenSampler:
    """Samples with one adapter."""

    def __init__(self, adapter: SequenceAdapter) -> None:
        self._adapter = adapter

    def encode(self, request: GenerationRequest) -> EncodedPrompts:
        """Raises ValueError for a prompt that the family does not take, or that is too long."""
        limit = _sequence(request).max_prompt_tokens
        prompts = {}
        for group in request.groups:
            prompt = prompts[group.group] = self._adapter.encode(group.prompt, group.inputs)
            if limit is not None and len(prompt.token_ids) > limit:
                raise ValueError(
                    f"group {group.group}: its prompt has {len(prompt.token_ids)} tokens, more than "
                    f"rollout.sequence.max_prompt_tokens = {limit}: raise the limit or shorten the prompt"
                )
        return prompts

    @torch.no_grad()
    def sample(
        self,
        request: GenerationRequest,
        prompts: EncodedPrompts,
        rows: Sequence[TokenRow],
        checkpoint: Callable[[], None],
    ) -> GeneratedBatch:
        """Writes one batch. `checkpoint` is called before every token."""
        settings = _sequence(request)
        with timed(self._adapter.device) as decode:
            written = self._write(settings, prompts, rows, checkpoint)
        with timed(self._adapter.device) as log_probs:
            records = [
                self._record(settings, prompts[row.group], sequence) if request.record == "tokens" else None
                for row, sequence in zip(rows, written, strict=True)
            ]
        samples = tuple(
            GeneratedSample(
                group=row.group,
                index=row.index,
                seed=row.seed,
                record=record,
                text=self._adapter.text(torch.tensor(sequence.token_ids)),
                prompt_tokens=len(prompts[row.group].token_ids),
                num_tokens=len(sequence.token_ids),
                stop_reason=sequence.stop_reason,
                failure=sequence.failure,
            )
            for row, sequence, record in zip(rows, written, records, strict=True)
        )
        groups = dict.fromkeys(row.group for row in rows)
        least = {group.group: min(group.indices) for group in request.groups}
        first = sum(row.index == least[row.group] for row in rows)
        seconds = {"decode": decode[0], "log_probs": log_probs[0]}
        return GeneratedBatch(samples, {group: prompts[group] for group in groups}, {}, seconds, {"encoder": first})

    def _write(
        self,
        settings: SequenceSampling,
        prompts: EncodedPrompts,
        rows: Sequence[TokenRow],
        checkpoint: Callable[[], None],
    ) -> list[_Written]:
        written = [_Written([]) for _ in rows]
        draws = torch.stack([draws_of(row.seed, settings.max_tokens) for row in rows])
        checkpoint()
        cache, logits, positions = self._read([prompts[row.group] for row in rows])
        for sequence, is_broken in zip(written, logits.isnan().any(dim=-1).tolist(), strict=True):
            sequence.failure = NOT_FINITE if is_broken else ""
        live = list(range(len(rows)))
        undrawn = torch.tensor(sorted(self._adapter.undrawn_ids), dtype=torch.int64, device=logits.device)
        for step in range(settings.max_tokens):
            if len(undrawn):
                logits = logits.index_fill(-1, undrawn, -torch.inf)
            chosen = choose(logits, draws[live, step].to(logits.device), settings.temperature, settings.top_p)
            kept = [
                index
                for index, (row, token) in enumerate(zip(live, chosen.tolist(), strict=True))
                if not self._ends(written[row], token, settings.stop)
            ]
            if not kept or step + 1 == settings.max_tokens:
                break
            if len(kept) < len(live):
                live = [live[index] for index in kept]
                chosen, positions = chosen[kept], positions[:, kept]
                cache.batch_select_indices(torch.tensor(kept, device=logits.device))
            checkpoint()
            logits = self._step(cache, chosen, positions)
            positions = positions + 1
        return written

    def _ends(self, written: _Written, token: int, stop: Sequence[str]) -> bool:
        """Adds a token; whether it was the last one."""
        written.token_ids.append(token)
        is_stop = token in self._adapter.stop_ids or (
            bool(stop) and any(text in self._adapter.text(torch.tensor(written.token_ids)) for text in stop)
        )
        if is_stop:
            written.stop_reason = "stop"
        return is_stop

    def _read(self, prompts: Sequence[EncodedPrompt]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Keys and values, logits (B, V) and the next positions (axes, B) of prompts of one length. Each different
        prompt is read once; equal ones stand together."""
        read: list[tuple[DynamicCache, Tensor, Tensor]] = []
        counts: list[int] = []
        for index, prompt in enumerate(prompts):
            if index and prompt is prompts[index - 1]:
                counts[-1] += 1
                continue
            read.append(self._read_one(prompt))
            counts.append(1)
        repeats = torch.tensor(counts, device=self._adapter.device)
        cache = DynamicCache()
        for number, layers in enumerate(zip(*(prompt_cache.layers for prompt_cache, _, _ in read), strict=True)):
            keys = torch.cat([layer.keys for layer in layers]).repeat_interleave(repeats, dim=0)
            values = torch.cat([layer.values for layer in layers]).repeat_interleave(repeats, dim=0)
            cache.update(keys, values, number)
        logits = torch.cat([row for _, row, _ in read]).repeat_interleave(repeats, dim=0)
        positions = torch.cat([column for _, _, column in read], dim=1).repeat_interleave(repeats, dim=1)
        return cache, logits, positions

    def _read_one(self, prompt: EncodedPrompt) -> tuple[DynamicCache, Tensor, Tensor]:
        inputs = self._adapter.model_inputs([Tokens(prompt, prompt.token_ids[:1])])
        self._adapter.routing.replay([], [])
        self._adapter.attention.lengths = ()
        cache = DynamicCache()
        output: Any = self._adapter.transformer(**inputs, past_key_values=cache, use_cache=True)
        return cache, output.logits[:, -1], self._adapter.next_positions(inputs["position_ids"])

    def _step(self, cache: DynamicCache, chosen: Tensor, positions: Tensor) -> Tensor:
        """The logits after one more token in every row."""
        shaped = positions[:, :, None] if len(positions) > 1 else positions[0][:, None]
        output: Any = self._adapter.transformer(
            input_ids=chosen[:, None], position_ids=shaped, past_key_values=cache, use_cache=True
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _record(self, settings: SequenceSampling, prompt: EncodedPrompt, written: _Written) -> TokenTrajectory:
        tokens = torch.tensor(written.token_ids)
        sequence = [Tokens(prompt, tokens)]
        routing = self._adapter.routing
        record: AbstractContextManager[Sequence[Sequence[Tensor]]]
        record = routing.recording() if settings.routed_experts else nullcontext(())
        with record as layers:
            log_probs = self._adapter.log_probs(sequence, temperature=settings.temperature)
        return TokenTrajectory(
            token_ids=tokens,
            log_probs=log_probs.float().cpu(),
            mask=torch.ones(len(tokens), dtype=torch.bool),
            stop_reason=written.stop_reason,
            routed_experts=routing.packed(_experts(layers)) if layers else None,
        )


def draws_of(seed: int, count: int) -> Tensor:
    """(count,) float64 numbers from 0 to 1 that a sample draws its tokens by, one each."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choose(logits: Tensor, draws: Tensor, temperature: float, top_p: float) -> Tensor:
    """(B,) int64 tokens, by inversion of the distribution function in the order of token ids.

    Args:
        logits: (B, V).
        draws: (B,) float64, from 0 to 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: draws from the fewest likeliest tokens that together have this probability.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered * (before < top_p))
    sums = probabilities.cumsum(dim=-1)
    places = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
    return places[:, 0].clamp(max=logits.shape[-1] - 1)


def _experts(layers: Sequence[Sequence[Tensor]]) -> Tensor:
    """(tokens, layers, top_k) on the CPU."""
    return torch.stack([torch.cat([*forwards]) for forwards in layers], dim=1).cpu()


def _sequence(request: GenerationRequest) -> SequenceSampling:
    assert request.sequence is not None, "checked before"
    return request.sequence
