"""The trainer: one job's weights, updated by any loss under FSDP2, checkpointed and published.

    server.py       rank 0: TrainerService over gRPC; commands run one at a time, status answers meanwhile
    publish.py      rank 0: drives the replicas through a weight update
    commands.py     what rank 0 tells the other ranks: protobuf bytes over a Gloo group
    worker.py       every rank: executes commands
      requests.py     what a step asks for, checked                      batches.py     which rank trains on what
      inputs.py       this rank's share of a step: blobs to tensors      update.py      the update of one step
      objectives/     what a loss trains on: noisy steps or new noise    totals.py      the step's metrics
      engine.py       transformers, adapter, FSDP2, optimizer            policies.py    reference, old policy, average
      blocks.py       checkpointing and compiling of blocks              loading.py     weights into shards
      optimizer.py    AdamW on shards                                    moments.py     its moments (quantized.py)
      checkpoints.py  safetensors by torch.distributed.checkpoint        export.py      folders that diffusers loads
    ranks.py        every rank: the process group, and agreeing on failures

All ranks execute the same commands in the same order. What can fail by the fault of others (blobs, files, the job file)
is done before anything changes, and all ranks agree that it went well; a failure after that ends the process, and the
job goes on from its last checkpoint.
"""
