"""Settings of policies that write tokens."""

from typing import Annotated

from pydantic import Field

from flowfleet.job.part import Part


class SequencePart(Part):
    """How a policy that writes tokens is sampled from. Log-probs are those of all tokens at `temperature`."""

    max_tokens: int = Field(default=1024, ge=1, le=1_048_576)
    """Tokens that a sequence has at most, its prompt not counted. One that is cut there is trained on as it is."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Tokens of a prompt; a longer one fails its request. Unset: no limit."""
    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Divisor of the logits in training."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=16)
    """Texts that end a sequence, besides the model's own end."""
    validation_temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """The same in validation; 0 takes the likeliest token."""
    routed_experts: bool = True
    """Train a mixture of experts with the experts that each token took in the rollout. transformers and vllm record
    them, one byte per token, layer and expert (two above 256 experts). Dense models and BAGEL have no routers and
    record none. A mixture's sample without its experts fails the job."""
