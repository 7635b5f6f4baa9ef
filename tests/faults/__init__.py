"""Seeded faults on a stack of real processes: `tests/e2e/test_chaos.py` runs a job under them.

    schedule ─► injector ─► faults ─► stack (processes, proxies, disk, clocks, Redis)
                                ▲
                                │ watch (the job's step and phase, by REST)

`schedule.py` is pure: a seed gives the faults, each with its kind, target, step and phase. The injector waits for the
step and the phase, strikes, and waits until the job has finished another step. `run.py` compares the exported weights
with those of a run without faults that was given the same drops.
"""
