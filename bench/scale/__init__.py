"""The scale rehearsal: one real controller and one real Redis, with as many replicas, trainers and jobs as asked for.
These are simulated, but each is a real gRPC server at an address of its own in 127.0.0.0/8.

    load.py         the sizes of a rehearsal, its durations and addresses
    simulation.py   servers and notes of the simulated services
    replicas.py     a process of simulated rollout replicas
    trainers.py     a process of simulated trainers, and the reward
    controller.py   the controller's own app, with a launcher that knows the simulated trainers
    rehearsal.py    starts all of them, runs the jobs and takes the figures
    figures.py      latencies and percentiles
"""
