"""Flowfleet's own losses and algorithms: settings and registration, by kind. Importing it registers them."""

import importlib

for _kind in ("policy", "matching", "followed", "pairs", "sequences"):  # the order of tables in the docs
    importlib.import_module(f"{__name__}.{_kind}")
