"""Flowfleet's own losses and algorithms: settings and registration, by kind. Importing it registers them."""

from flowfleet.algorithms.builtin import followed, matching, policy, sequences  # noqa: F401
