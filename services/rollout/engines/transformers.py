"""The transformers engine: the adapter of a policy that writes text, on one device. The reference for other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.proto.rollout_pb2 import ModelSpec
from services.rollout.engines.base import GeneratedBatch, GenerationRequest
from services.rollout.engines.local import LocalEngine
from services.rollout.engines.tokens import EncodedPrompts, TokenRow, TokenSampler, batches


class TransformersEngine(LocalEngine[SequenceAdapter]):
    """See `LocalEngine`. A batch holds samples of prompts of one length."""

    name = "transformers"
    writes_tokens = True

    def _set_up(self, adapter: SequenceAdapter, model: ModelSpec) -> None:
        if model.compile or model.quantization not in ("", "none"):
            raise ValueError(
                f"model {model.path} writes text: the engine {self.name} neither compiles nor quantizes it, remove "
                "rollout.compile and rollout.quantization"
            )
        self._sampler = TokenSampler(adapter)

    def _encode(self, request: GenerationRequest) -> EncodedPrompts:
        assert self._sampler is not None, "prepare comes first"
        check_request(request)
        encoded: EncodedPrompts = self._sampler.encode(request)
        return encoded

    def _cut(self, request: GenerationRequest, encoded: EncodedPrompts) -> list[Sequence[TokenRow]]:
        return batches(request, encoded, self._max_batch)

    def _load_of(self, request: GenerationRequest, num_rows: int) -> tuple[str, float]:
        return "tokens", float(num_rows)

    def _sample(
        self,
        request: GenerationRequest,
        encoded: EncodedPrompts,
        rows: Sequence[TokenRow],
        checkpoint: Callable[[], None],
    ) -> GeneratedBatch:
        sampled: GeneratedBatch = self._sampler.sample(request, encoded, rows, checkpoint)
        return sampled


def check_request(request: GenerationRequest) -> None:
    """Raises ValueError for a request of pictures or videos."""
    if request.sequence is None:
        raise ValueError("sampling.sequence is not set: this replica's model writes text")
