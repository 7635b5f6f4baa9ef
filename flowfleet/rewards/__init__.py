"""Rewards: a function as a service (`serve`), the rules that all rewards share, and changes of a job's rewards."""

from flowfleet.rewards.service import Params, Pending, Sample, serve

__all__ = ["Params", "Pending", "Sample", "serve"]
