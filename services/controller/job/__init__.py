"""Runs one job.

machine/        what is wanted now: events in, commands out; the ledger keeps the events
driver          starts what is wanted and makes what happened durable
step            runs each command: commands/ has a file each
trainer/        calls to the job's trainer, and how long it may be silent
recovery/       what becomes of failures
reporting/      metrics, events and results of the job
"""
