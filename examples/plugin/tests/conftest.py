"""Gives tiny models one thread: more only wait for each other on a busy machine."""

import torch

torch.set_num_threads(1)
