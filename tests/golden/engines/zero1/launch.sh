#!/usr/bin/env bash
# ZeRO-1 8: 1 node x 8 GPUs.
#   through Slurm:  sbatch advice/plan-1/launch/slurm.sbatch
#   other engine:   TRAIN=train.py advice/plan-1/launch.sh
#   train_deepspeed.py needs `pip install deepspeed`
# Arguments are handed on.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
train="$here/${TRAIN:-train_deepspeed.py}"
exec torchrun --standalone --nproc-per-node 8 "$train" "$@"
