"""What a loss trains on: stored noisy steps, by log-probs (policy.py) or with a teacher's (distillation.py); new
noise over finished latents (matching.py); a reward's gradient at a predicted image (gradient.py); or written tokens
(sequence.py).

`base.py` says what the update loop wants of each; `draws.py` has the noise of matching.py and gradient.py.
"""
