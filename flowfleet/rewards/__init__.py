"""A reward as a service (`serve`), what every reward holds calls to, and changes of a job's rewards."""

from flowfleet.rewards.service import Params, Pending, Sample, serve

__all__ = ["Params", "Pending", "Sample", "serve"]
