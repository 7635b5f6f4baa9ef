"""What a job will need, found out without its weights; plan.py puts the parts together."""
