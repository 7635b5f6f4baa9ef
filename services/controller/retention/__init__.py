"""What stays of ended jobs in Redis, for how long, and what happens as Redis fills."""
