"""Cost of a sequence's length in its reward: DAPO's soft overlong punishment. Free of torch."""


def overlong_penalty(num_tokens: int, max_tokens: int, share: float) -> float:
    """Rises linearly from 0 to 1 in the last `share` of `max_tokens` (https://arxiv.org/abs/2503.14476, equation 13,
    where 4,096 of 20,480 tokens are a share of 0.2).

    Args:
        num_tokens: that were written.
        max_tokens: that were allowed; a sequence of that many costs 1.
        share: 0 gives 0 throughout.
    """
    buffer = share * max_tokens
    free = max_tokens - buffer
    return min(1.0, (num_tokens - free) / buffer) if buffer and num_tokens > free else 0.0
