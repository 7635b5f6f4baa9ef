"""The job file: what it may say, what goes with what, where its paths lead."""

from flowfleet.job.spec import JobSpec

__all__ = ["JobSpec"]
