"""Cost of rewards and judges, and what training against them teaches."""
