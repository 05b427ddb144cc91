#!/usr/bin/env bash
# DDP 4 through torchtitan 0.3. Arguments are handed on: --training.steps 1000
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # for titan_config.py
exec torchrun --standalone --nproc-per-node 4 -m torchtitan.train --module titan_config --config train \
  --training.local_batch_size 1 \
  --training.global_batch_size 4 \
  --training.seq_len 8192 \
  --training.dtype bfloat16 \
  --training.mixed_precision_param bfloat16 \
  --parallelism.data_parallel_replicate_degree 4 \
  --parallelism.data_parallel_shard_degree 1 \
  --parallelism.tensor_parallel_degree 1 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 1 \
  "$@"
