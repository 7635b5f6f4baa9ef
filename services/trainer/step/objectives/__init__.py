"""What a loss trains on: stored noisy steps (policy.py) or new noise over finished latents (matching.py).

`base.py` says what the update loop wants of either; `draws.py` has the noise of the second.
"""
