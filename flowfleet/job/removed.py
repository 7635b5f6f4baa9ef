"""Settings of earlier releases that are gone, and what to do in their place."""

import re

_LIMIT = "algorithm.correction.low and .high bound the ratios of every mode but none"
REMOVED = {
    "algorithm.clip_nats_low": "algorithm.clip_range_low is the lower limit, per latent element",
    "algorithm.correction.joint": "the ratio is the geometric mean per element; leave it out",
    "algorithm.correction.normalize": "weights are not divided by their mean; leave it out",
    "algorithm.correction.reject_high": _LIMIT,
    "algorithm.correction.reject_low": _LIMIT,
    "algorithm.kl_threshold_nats": "algorithm.kl_threshold is the limit, a mean over a step's elements",
    "algorithm.kl_gate.share": "the gate covers the tenth of the samples that is doubted most; leave it out",
    "algorithm.old_kl_coef": "AWM's distance to the old policy counts 1; leave it out",
    "algorithm.old_policy.every": "the old policy moves after every step; lower algorithm.old_policy.rate",
    "algorithm.old_policy.samples": "the loss decides it: CRD samples with the trained policy, others with the old one",
    "data.sources.N.ignore_columns": "data.ignore_columns holds for all sources",
    "data.sources.N.prompt_column": "data.prompt_column holds for all sources: rename the column",
    "rollout.on_drop": "rollout.max_refills = 0 trains on fewer samples",
    "rollout.sequence.top_p": "tokens are drawn from all; leave it out, or lower rollout.sequence.temperature",
    "trainer.base_gradients": "the backward of an fp8 base multiplies in fp8; leave it out",
    "trainer.lora.merge": "the adapter is exported alone; load it with diffusers and merge it into its pipeline there",
    "trainer.optimizer.final_lr": "linear and cosine schedules end at 0; leave it out",
}
"""Dotted names, `N` in a list, to a sentence."""


def replacement(name: str) -> str:
    """Names the replacement of a removed setting; empty for any other name."""
    return REMOVED.get(re.sub(r"\.\d+\.", ".N.", name), "")
