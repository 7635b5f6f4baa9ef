"""Objectives: how a step's samples become gradients of a loss.

    policy         stored noisy steps, by log-probs
    distillation   stored noisy steps, next to a teacher's means
    matching       new noise over finished latents
    gradient       a reward's gradient at a predicted image
    sequence       written tokens

`base.py` has the interface that the update loop calls; `draws.py` has the noise of matching.py and gradient.py.
"""
