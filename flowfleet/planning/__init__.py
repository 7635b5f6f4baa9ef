"""What a job will need, found out without its weights; see flowfleet/plan.py, which puts the parts together."""
