#!/usr/bin/env bash
# HSDP 2 x 4, recompute full, CPU offload through torchtitan 0.3. Arguments are handed on: --training.steps 1000
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # for titan_config.py
exec torchrun --standalone --nproc-per-node 8 -m torchtitan.train --module titan_config --config train \
  --training.local_batch_size 2 \
  --training.global_batch_size 32 \
  --training.seq_len 8192 \
  --training.dtype bfloat16 \
  --training.mixed_precision_param bfloat16 \
  --parallelism.data_parallel_replicate_degree 2 \
  --parallelism.data_parallel_shard_degree 4 \
  --parallelism.tensor_parallel_degree 1 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 1 \
  --parallelism.fsdp_reshard_after_forward always \
  --training.enable_cpu_offload \
  --training.disable_cuda_graphs \
  "$@"
