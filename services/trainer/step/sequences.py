"""A step's sequences on their way to tensors: this rank's share of the blobs, read and checked. As inputs.py does for
flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.errors import InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from services.trainer.step.batches import MicroBatch, Update
from services.trainer.step.inputs import READERS, Batch, naming


@dataclass(frozen=True, kw_only=True)
class SequenceBatch(Batch):
    """Sequences of one packed row; N of their written tokens are trained."""

    sequences: tuple[Tokens, ...]
    """B of them."""
    mask: Tensor
    """(written tokens of all,) bool on the device: True for the N that are trained."""
    owners: Tensor
    """(N,) int64: the sequence of each."""
    rollout_tokens: Tensor
    """(N,) float32, as the rollout stored them."""
    lengths: tuple[int, ...]
    """B numbers of trained tokens."""

    @property
    def rollout_log_probs(self) -> Tensor:
        """(1, B) float64: the mean over each sequence's trained tokens."""
        return self.means(self.rollout_tokens)[None]

    def split(self, values: Tensor) -> list[Tensor]:
        """(N,) values by sequence."""
        return list(torch.split(values, list(self.lengths)))

    def means(self, values: Tensor) -> Tensor:
        """(B,) float64: means of (N,) values over each sequence."""
        return torch.stack([row_values.double().mean() for row_values in self.split(values)])


class SequenceReader:
    """Reads the blobs of a rank's micro-batches into host memory; `batch` then puts one on the device."""

    def __init__(
        self, adapter: SequenceAdapter, spec: JobSpec, blobs: SyncBlobs, on_sample: Callable[[], None] = lambda: None
    ) -> None:
        """`on_sample` is called after each sample that was read."""
        self._adapter, self._spec, self._blobs, self._on_sample = adapter, spec, blobs, on_sample
        self._vocabulary = adapter.vocabulary_size
        self._samples: Sequence[TrainSample] = ()
        self._written: dict[int, TokenTrajectory] = {}
        self._prompts: dict[str, EncodedPrompt] = {}

    def read(self, request: TrainStepRequest, updates: Iterable[Update], rank: int) -> None:
        """Raises NotFound or DataLoss naming the first sample whose blob is gone or broken."""
        self._samples, self._written = request.samples, {}
        rows = sorted({row for update in updates for batch in update.by_rank[rank] for row in batch.rows})
        with ThreadPoolExecutor(READERS, "blobs") as pool:
            wanted = {self._samples[row].sample.prompt_embeds.sha256: row for row in reversed(rows)}
            self._prompts = dict(zip(wanted, pool.map(self._prompt, wanted.values()), strict=True))
            for row, written in zip(rows, pool.map(self._trajectory, rows), strict=True):
                self._written[row] = written
                self._on_sample()

    def batch(self, micro: MicroBatch) -> SequenceBatch:
        """A micro-batch of those read."""
        device = self._adapter.device
        items = [self._samples[row] for row in micro.rows]
        written = [self._written[row] for row in micro.rows]
        lengths = tuple(int(trajectory.mask.sum()) for trajectory in written)
        sequences = tuple(
            Tokens(self._prompts[item.sample.prompt_embeds.sha256], trajectory.token_ids, trajectory.routed_experts)
            for item, trajectory in zip(items, written, strict=True)
        )
        return SequenceBatch(
            rows=micro.rows,
            is_padding=micro.is_padding,
            advantages=torch.tensor([item.advantage for item in items], dtype=torch.float32, device=device),
            sequences=sequences,
            mask=torch.cat([trajectory.mask for trajectory in written]).to(device),
            owners=torch.repeat_interleave(torch.arange(len(items)), torch.tensor(lengths)).to(device),
            rollout_tokens=torch.cat([trajectory.log_probs[trajectory.mask] for trajectory in written]).to(device),
            lengths=lengths,
        )

    def clear(self) -> None:
        """Frees the step's data."""
        self._samples, self._written, self._prompts = (), {}, {}

    def _prompt(self, row: int) -> EncodedPrompt:
        sample = self._samples[row].sample
        with naming(sample):
            prompt = PromptBlob.from_bytes(self._blobs.get(sample.prompt_embeds)).encoded()
            self._check_ids("prompt", prompt.token_ids, sample.prompt_tokens)
            return prompt

    def _trajectory(self, row: int) -> TokenTrajectory:
        sample = self._samples[row].sample
        ref: BlobRef = sample.trajectory
        with naming(sample):
            written = TokenTrajectory.from_bytes(self._blobs.get(ref))
            self._check_ids("sequence", written.token_ids, sample.num_tokens)
            self._check_experts(self._prompts[sample.prompt_embeds.sha256], written)
            return written

    def _check_experts(self, prompt: EncodedPrompt, written: TokenTrajectory) -> None:
        """A model without experts has none to replay, whatever the job asks."""
        routing, is_replayed = self._adapter.routing, self._spec.rollout.sequence.routed_experts
        if written.routed_experts is not None:
            if not is_replayed:
                raise InvalidRequest(
                    "it has routed_experts, and rollout.sequence.routed_experts is off: restart its rollout"
                )
            routing.check(written.routed_experts, len(prompt.token_ids) + len(written.token_ids) - 1)
        elif is_replayed and routing.num_layers:
            raise InvalidRequest(
                "it has no routed_experts: set rollout.sequence.routed_experts = false if rollouts cannot record them"
            )

    def _check_ids(self, what: str, token_ids: Tensor, number: int) -> None:
        if len(token_ids) != number:
            raise InvalidRequest(f"its {what} has {len(token_ids)} tokens, the sample says {number}")
        if int(token_ids.max()) >= self._vocabulary:
            raise InvalidRequest(
                f"its {what} has token {int(token_ids.max())}, and the model has {self._vocabulary}: rollout and "
                "trainer need the same model folder"
            )
