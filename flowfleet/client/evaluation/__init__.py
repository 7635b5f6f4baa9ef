"""Models compared on held-out prompts; `evaluate` submits the evaluations and waits for them."""

from flowfleet.client.evaluation.jobs import evaluate as evaluate
