"""Limits which ended jobs stay in Redis and for how long, and holds jobs back as Redis fills."""
