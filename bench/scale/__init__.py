"""The scale rehearsal: one real controller and one real Redis, with as many replicas, trainers and jobs as asked for,
which are simulated, but are real gRPC servers at addresses of their own in 127.0.0.0/8 (docs/results.md).

    load.py         what is rehearsed: how many of each, how long things take, where each one is
    simulation.py   what the simulated services have in common
    replicas.py     a process of simulated rollout replicas
    trainers.py     a process of simulated trainers, and the reward
    controller.py   the controller's own app, with a launcher that tells where those trainers are
    tracing/        what traces cost, in pairs of rehearsals; a collector that drops them
    probe.py        asks /healthz from a process of its own
    processes.py    starts them, and reads what each used of the machine
    rehearsal.py    runs it and takes the figures
    figures.py      percentiles, tables
"""
