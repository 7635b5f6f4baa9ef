"""Trainer: holds one job's weights on all ranks, updates them by any loss, checkpoints and publishes them.

    server         rank 0: TrainerService over gRPC; runs commands one at a time, answers status calls meanwhile
    publishing/    rank 0: takes the replicas through a weight update
    commands       messages from rank 0 to the other ranks: protobuf bytes over a Gloo group
    runner         queue of commands on rank 0; worker: executes them on every rank
    step/          one training step: request, inputs, batches, update, totals; objectives/: gradients of each loss
    model/         transformers, adapter; reference, old policy, average; export: folders that diffusers loads
    optim/         AdamW on shards, its moments, the scale of the loss
    checkpoints/   safetensors by torch.distributed.checkpoint, verified and fenced
    parallel/      the process group and agreement on failures; FSDP2's shards, or whole adapters; blocks

All ranks execute the same commands in the same order. Work that can fail through blobs, files or the job file comes
before any change, and all ranks agree that it succeeded. A later failure ends the process, and the job resumes from its
last checkpoint.
"""
