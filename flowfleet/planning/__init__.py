"""Predictions of a job's needs, made without its weights; plan.py puts the parts together."""
