"""Algorithms, none of which names a model: reverse steps, windows of noise, losses, rollout correction.

`registry`, `settings`, `builtin` and `windows` are free of torch, for the controller and the docs; `sde`, `losses`,
`matching`, `sequences.losses` and `correction` need it. Import the modules, not this package, which only registers
Flowfleet's own algorithms.
"""

from flowfleet.algorithms import builtin as _builtin  # noqa: F401
