"""What a loss trains on: stored noisy steps, by log-probs (policy.py) or with a teacher's (distillation.py); new
noise over finished latents (matching.py); or written tokens (sequence.py).

`base.py` says what the update loop wants of either; `draws.py` has the noise of the second.
"""
