"""Algorithms, none of which names a model: reverse steps, windows of noise, losses, rollout correction.

`registry`, `sequence_registry`, `windows` and `tables` are free of torch, for the controller and the docs; `sde`,
`losses`, `matching`, `sequences` and `correction` need it. Import the modules, not this package, which only registers
the algorithms of policies that write tokens.
"""

from flowfleet.algorithms import sequence_registry as sequence_registry
