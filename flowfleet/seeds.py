"""Seeds of all random numbers of a job, derived from its own. Pure: equal arguments give equal seeds everywhere."""

import hashlib


def derive_seed(seed: int, *path: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. `derive_seed(job.seed, "sample", step, group, index)`.

    SHA-256 over the path, so that neighbors are independent and no purpose can collide with another.
    """
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sample_seed(seed: int, step: int, group: int, index: int) -> int:
    """Seed of one training sample."""
    return derive_seed(seed, "sample", step, group, index)


def validation_seed(seed: int, prompt: int, index: int = 0) -> int:
    """Seed of one sample of a held-out prompt: the same at every validation, so that curves compare."""
    return derive_seed(seed, "validation", prompt, *([index] if index else []))
