"""The learning rate of an update: a pure function of its place in the job, so that a resumed job continues exactly.

The place counts updates as if every step had all of its own and none were skipped. So both experts of a model follow
one schedule, and it ends with the job whatever samples were dropped.
"""

import math

from flowfleet.job.spec import JobSpec


def learning_rate(spec: JobSpec, step: int, number: int) -> float:
    """The rate of update `number` of training step `step`, both from 0.

    In the warm-up it is lr i / warmup_updates at place i, which begins at 0, as in diffusers' and transformers'
    `get_scheduler`; then it falls to 0, which it would reach one update after the job's last one.
    """
    part, each = spec.trainer.optimizer, spec.most_updates_per_step
    update_index, warmup, total = step * each + number, part.warmup_updates, spec.schedule.steps * each
    if update_index < warmup:
        return part.lr * update_index / warmup
    progress = (update_index - warmup) / max(1, total - warmup)
    if part.lr_schedule == "constant":
        return part.lr
    left = 1 - progress if part.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return part.lr * left
