"""What Prometheus is shown of fleet, jobs, data plane and Redis."""
