"""The rollout service: samples groups of images under a verified policy version, and takes new weights.

    server.py        RolloutService: admission, streaming, the phases of a weight update
    weights.py       the receiver's state machine (pure)
    requests.py      GenerateRequest to the engine's plain request, checked
    publisher.py     pictures and trajectories to the blob store and the job's stream
    registration.py  the replica's heartbeat in Redis
    engines/         what samples: an interface, and one file an engine

Invariant: a sample carries a policy version only if that version was verified before its first denoising step and was
still live after its last.
"""
