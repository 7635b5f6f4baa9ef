"""One running job.

state_machine   what is wanted now; state is what it knows, batch its step, events its input
driver          starts what is wanted and makes what happened durable in the ledger
step            does it: one method a command
recovery/       what becomes of failures
"""
