#!/usr/bin/env bash
# FSDP 4, CPU offload: 1 node x 4 GPUs.
#   through Slurm:  sbatch advice/plan-1/launch/slurm.sbatch
#   other engine:   TRAIN=train_deepspeed.py advice/plan-1/launch.sh
#   train_deepspeed.py needs `pip install deepspeed`
# Arguments are handed on.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
train="$here/${TRAIN:-train.py}"
exec torchrun --standalone --nproc-per-node 4 "$train" "$@"
