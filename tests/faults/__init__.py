"""`flowfleet chaos`: seeded faults on a stack of real processes, and what they cost the job that runs there.

    schedule ─► injector ─► faults ─► stack (processes, proxies, disk, clocks, Redis)
                   │           ▲
                   ▼           │ watch (the job's step and phase, by REST)
                 ledger ─► report

`schedule.py` is pure: a seed gives the faults, each with its kind, target, step and phase. The injector waits for the
step and the phase, strikes, and waits until the job has finished another step. The ledger has a line for each fault.
The report compares the exported weights with those of a run without faults that was given the same drops.
"""
