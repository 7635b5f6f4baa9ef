"""Registers the plugin, also where it is not installed. Tiny models have one thread: more only wait for each other."""

import torch

import flowfleet_example

assert flowfleet_example
torch.set_num_threads(1)
