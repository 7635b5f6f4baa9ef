"""Checkpoints that are one folder of safetensors and a `config.json`, without diffusers' folders for components.

A family with such checkpoints says how the parameters of its transformer are named in these files (`StoredNames`, as
its class attribute `stored`). Trainers then read their rows from the files, and an export has the files' other tensors
unchanged next to the trained ones.
"""

from types import SimpleNamespace
from typing import Any


class FlatPipeline(SimpleNamespace):
    """The components of such a checkpoint, in place of diffusers' pipeline."""

    def register_modules(self, **modules: Any) -> None:
        """Sets components, like the method of diffusers' pipelines."""
        self.__dict__.update(modules)
