"""Calls to a judge's servers: which one, how many at once, what a failure means."""
