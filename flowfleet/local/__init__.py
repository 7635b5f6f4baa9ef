"""The whole fleet on one machine, as real processes: what `flowfleet up`, `down` and `demo` are made of.

    plan.py        which processes there are, their command lines, ports and environment (pure)
    pools.py       what a rollout pool is, and pools.json
    pool_changes.py  adds and removes pools while the stack runs
    placement.py   which process gets which accelerator at the start (pure)
    devices.py     the table of who has which accelerator now
    ports.py       free ports that stay free while a process is restarted
    stack.py       the state directory: stack.json, the lock of its live supervisor, process records
    processes.py   finding and ending every process of a stack, trainers and orphans too
    health.py      when a process serves, and when it still answers
    supervisor.py  starts everything at once, announces when all serve, restarts what dies or hangs, stops in order
    watchdog.py    ends the stack when its supervisor was killed without a chance to do so
    session.py     the stack as a context manager, and `up --detach`

A suspended supervisor restarts nothing until it is continued, and then ignores the time that it slept itself;
`flowfleet down` continues it first. No process outlives its supervisor: a clean stop ends all in order, and if the
supervisor is killed, the watchdog sees its pipe close and does the same. This package starts services by command line
(`python -m services.…`); it never imports one.
"""
