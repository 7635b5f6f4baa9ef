"""Metrics of fleet, jobs, data plane and Redis for Prometheus."""
