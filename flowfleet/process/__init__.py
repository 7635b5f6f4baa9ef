"""The life of a service process: flags, logs, metrics, health, clock, forks and command lines."""
