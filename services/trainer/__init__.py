"""The trainer: one job's weights, updated by any loss on all ranks, checkpointed and published.

    server         rank 0: TrainerService over gRPC; commands run one at a time, status answers meanwhile
    publishing/    rank 0: drives the replicas through a weight update
    commands       what rank 0 tells the other ranks: protobuf bytes over a Gloo group
    runner         rank 0's commands, one at a time; worker: every rank executes them
    step/          one training step: request, inputs, batches, update, totals; objectives/: what a loss trains on
    model/         transformers, adapter; reference, old policy, average; export: folders that diffusers loads
    optim/         AdamW on shards, its moments, the scale of the loss
    checkpoints/   safetensors by torch.distributed.checkpoint, verified and fenced
    parallel/      the process group and agreeing on failures; FSDP2's shards, or whole adapters; blocks

All ranks execute the same commands in the same order. What can fail by the fault of others (blobs, files, the job file)
is done before anything changes, and all ranks agree that it went well; a failure after that ends the process, and the
job resumes from its last checkpoint.
"""
