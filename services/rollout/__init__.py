"""Rollout service: samples groups of images under a verified policy version, and takes new weights.

    __main__, process   flags, drain
    replica             the parts around an engine; a trainer's rank that samples has them too
    server              RolloutService: admission, streaming, status
    registration        the replica's entry in the fleet, and its health
    sampling/           one admitted request: checked, sampled, published, dropped when its caller is gone
    weights/            which weights are live and who may use them (state: pure), and the four phases of an update
    engines/            an interface, and one engine per file or folder

Invariant: a sample carries a policy version only if that version was verified before its first denoising step and was
still live after its last.
"""
