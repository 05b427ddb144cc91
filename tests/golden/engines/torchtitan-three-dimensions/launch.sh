#!/usr/bin/env bash
# PP 2 interleave 2 x TP 2 x ZeRO-2 4, recompute selective through torchtitan 0.3. Arguments are handed on: --training.steps 1000
#   on every node:  HEAD_NODE=<name of the first node> advice/plan-1/torchtitan/launch.sh
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # for titan_config.py
: "${HEAD_NODE:?set it to the name of the first node}"
exec torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE":29500 -m torchtitan.train --module titan_config --config train \
  --training.local_batch_size 8 \
  --training.global_batch_size 32 \
  --training.seq_len 8192 \
  --training.dtype bfloat16 \
  --training.mixed_precision_param bfloat16 \
  --parallelism.data_parallel_replicate_degree 1 \
  --parallelism.data_parallel_shard_degree 4 \
  --parallelism.tensor_parallel_degree 2 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 2 \
  --parallelism.fsdp_reshard_after_forward never \
  --parallelism.enable_sequence_parallel \
  --parallelism.pipeline_parallel_schedule Interleaved1F1B \
  --parallelism.pipeline_parallel_microbatch_size 1 \
  --parallelism.pipeline_parallel_layers_per_stage 8 \
  --parallelism.pipeline_parallel_first_stage_less_layers 0 \
  --parallelism.pipeline_parallel_last_stage_less_layers 0 \
  --training.disable_cuda_graphs \
  "$@"
