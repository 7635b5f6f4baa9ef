"""Copies a job's curves, pictures and settings to an experiment tracker, from outside of the job.

`follower` reads the controller's event stream and hands each step and each validation to a `tracker`. `place` notes on
disk how far it came. One module a tracker: `wandb`, `tensorboard`, `mlflow` and `trackio` are imported only where the
user asks for them. The controller knows nothing of all this: no address, no key.
"""
