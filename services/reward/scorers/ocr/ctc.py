"""How probable a text is under a CTC recognizer: the smooth companion of the edit distance.

Graves et al., "Connectionist Temporal Classification" (ICML 2006), equations 6 to 8: the probability of a labeling is
the sum over all frame-wise paths that collapse to it, by the forward recursion over the labeling with blanks between.
"""

import math

import numpy as np
from numpy.typing import NDArray


def log_probability(symbols: NDArray[np.float64], repeats: NDArray[np.bool_], blank: NDArray[np.float64]) -> float:
    """ln P(labeling | frames), −inf where it is impossible.

    symbols (T, L): probability of each of the labeling's L ≥ 1 characters in each of T frames; blank (T,): that of
    the blank; repeats (L,): whether a character equals the one before it, so that a blank must part them.
    """
    length = symbols.shape[1]
    frames = np.repeat(blank[:, None], 2 * length + 1, axis=1)
    frames[:, 1::2] = symbols
    may_skip = np.zeros(2 * length + 1)
    may_skip[3::2] = ~repeats[1:]
    return _forward(frames, may_skip)


def _forward(frames: NDArray[np.float64], may_skip: NDArray[np.float64]) -> float:
    """The recursion over (T, 2L + 1) states. Each frame's variables are scaled to sum to 1: nothing underflows."""
    state = np.zeros(frames.shape[1])
    state[0] = 1.0
    log_scale = 0.0
    for frame in frames:
        arriving = state.copy()
        arriving[1:] += state[:-1]
        arriving[2:] += may_skip[2:] * state[:-2]
        state = arriving * frame
        total = float(state.sum())
        if total == 0.0:
            return -math.inf
        state /= total
        log_scale += math.log(total)
    ending = float(state[-2:].sum())
    return log_scale + math.log(ending) if ending > 0.0 else -math.inf
