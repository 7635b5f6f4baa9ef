"""The transformers engine: the adapter of a policy that writes text, on one device. The reference for other engines."""

from collections.abc import Sequence

from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.proto.rollout_pb2 import ModelSpec
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.local import LocalEngine
from services.rollout.engines.tokens import EncodedPrompts, TokenRow, TokenSampler, batches


class TransformersEngine(LocalEngine[SequenceAdapter]):
    """See `LocalEngine`. A batch holds samples of prompts of one length."""

    name = "transformers"
    writes_tokens = True

    def _set_up(self, adapter: SequenceAdapter, model: ModelSpec) -> None:
        self._require_plain(model)
        self._sampler = TokenSampler(adapter)

    def _check(self, request: GenerationRequest) -> None:
        if request.sequence is None:
            raise ValueError("sampling.sequence is not set: this replica's model writes text")

    def _cut(self, request: GenerationRequest, encoded: EncodedPrompts) -> list[Sequence[TokenRow]]:
        return batches(request, encoded, self._max_batch)

    def _load_of(self, request: GenerationRequest, num_rows: int) -> tuple[str, float]:
        return "tokens", float(num_rows)
