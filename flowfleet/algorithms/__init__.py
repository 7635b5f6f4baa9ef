"""Algorithms, none of which names a model: reverse steps, windows of noise, losses, rollout correction.

`registry`, `sequences.registry` and `windows` are free of torch, for the controller and the docs; `sde`, `losses`,
`matching`, `sequences.losses` and `correction` need it. Import the modules, not this package, which only registers
the algorithms of policies that write tokens.
"""

from flowfleet.algorithms.sequences import registry as _registry  # noqa: F401
