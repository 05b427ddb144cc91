#!/usr/bin/env bash
# ZeRO-2 8, recompute selective: the model of examples/llama3_8b.py through Megatron-LM 0.19, which builds it anew. Further arguments are handed on.
#   MEGATRON_LM=<folder of Megatron-LM> advice/plan-1/megatron/pretrain.sh
# Yours to set: data and tokenizer (made up here), learning rate and steps, --rotary-base unless it is 10000.
# Attention is causal and norms come before attention and feed-forward, as in GPT and Llama.
set -euo pipefail

arguments=(
  # the model
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --seq-length 8192
  --max-position-embeddings 8192
  --position-embedding-type rope
  --normalization RMSNorm
  --vocab-size 128256
  --tokenizer-type NullTokenizer
  --group-query-attention
  --num-query-groups 8
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  # how it is spread
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads
  --ckpt-format fsdp_dtensor
  # training
  --micro-batch-size 2
  --global-batch-size 16
  --recompute-granularity selective
  --bf16
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --clip-grad 1.0
  --optimizer adam
  --lr 0.0003
  --train-iters 1000
  --mock-data
)
: "${MEGATRON_LM:?set it to the folder of Megatron-LM}"
exec torchrun --standalone --nproc-per-node 8 "$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" "$@"
