"""A step's sequences on their way to tensors: this rank's share of the blobs, read and checked. As inputs.py does for
flows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowfleet.data.sequences import PromptBlob, TokenTrajectory
from flowfleet.errors import InvalidRequest
from flowfleet.models.sequences.adapter import Tokens
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.proto.common_pb2 import BlobRef
from services.trainer.step.batches import MicroBatch
from services.trainer.step.inputs import Batch, Reader, naming


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


class SequenceReader(Reader):
    """Reader of written sequences."""

    def batch(self, micro: MicroBatch) -> SequenceBatch:
        device = self._adapter.device
        items = [self._samples[row] for row in micro.rows]
        written: list[TokenTrajectory] = [self._records[row] for row in micro.rows]
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

    def _prompt(self, wanted: tuple[int, BlobRef]) -> EncodedPrompt:
        sample = self._samples[wanted[0]].sample
        with naming(sample):
            prompt = PromptBlob.from_bytes(self._blobs.get(sample.prompt_embeds)).encoded()
            self._check_ids("prompt", prompt.token_ids, sample.prompt_tokens)
            return prompt

    def _record(self, row: int) -> TokenTrajectory:
        sample = self._samples[row].sample
        with naming(sample):
            written = TokenTrajectory.from_bytes(self._blobs.get(sample.trajectory))
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
        if int(token_ids.max()) >= (known := self._adapter.vocabulary_size):
            raise InvalidRequest(
                f"its {what} has token {int(token_ids.max())}, and the model has {known}: rollout and "
                "trainer need the same model folder"
            )
