#!/bin/sh
# Starts the trainer of a job with `trainer.launcher = "attach"` on this machine, by torchrun alone.
# On several machines run it on each, with NODES, NODE_RANK and MASTER set.
#
#   flowfleet submit job.toml
#   flowfleet attach JOB --json                 # token and command
#   CONTROLLER=https://fleet.example.com FLOWFLEET_ATTACH_TOKEN=… examples/launch/torchrun.sh
set -eu
exec torchrun --nnodes="${NODES:-1}" --node-rank="${NODE_RANK:-0}" --nproc-per-node="${RANKS:-1}" \
  --master-addr="${MASTER:-127.0.0.1}" --master-port="${PORT:-29500}" --max-restarts="${RESTARTS:-0}" \
  -m services.trainer --controller "${CONTROLLER:?set it to the address of the controller}"
