#!/usr/bin/env bash
# FSDP 16, recompute full: 2 nodes x 8 GPUs.
#   on every node:  HEAD_NODE=<name of the first node> advice/plan-1/launch.sh
#   through Slurm:  sbatch advice/plan-1/launch/slurm.sbatch
#   other engine:   TRAIN=train_deepspeed.py advice/plan-1/launch.sh
#   train_deepspeed.py needs `pip install deepspeed`
# Arguments are handed on.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
train="$here/${TRAIN:-train.py}"
if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then
  HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
: "${HEAD_NODE:?set it to the name of the first node}"
exec torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD_NODE:${PORT:-29500}" --rdzv-id "${SLURM_JOB_ID:-0}" "$train" "$@"
