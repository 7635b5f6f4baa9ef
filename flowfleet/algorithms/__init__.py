"""Algorithms, none of which names a model: reverse steps, windows of noise, losses, rollout correction.

`windows` is free of torch, for the controller; `sde`, `losses` and `correction` need it. Import the modules, not this
package.
"""
