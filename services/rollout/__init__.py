"""The rollout service: samples groups of images under a verified policy version, and takes new weights.

    __main__, process  flags, wiring, drain
    server             RolloutService: admission, streaming, status
    generation         one admitted request: engine and publisher overlapped, dropped when nobody waits
    weights            which weights are live and who may use them: the receiver's state machine (pure)
    binding            InitWeightTransfer, checked as a whole before anything is let go
    receiver           the four phases of a weight update around it
    requests           GenerateRequest to the engine's plain request, checked
    publisher          pictures and trajectories to the blob store and the job's stream
    registration       the replica's entry in the fleet, and its health
    engines/           what samples: an interface, and one file an engine

Invariant: a sample carries a policy version only if that version was verified before its first denoising step and was
still live after its last.
"""
