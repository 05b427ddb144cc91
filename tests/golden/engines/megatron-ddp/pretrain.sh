#!/usr/bin/env bash
# DDP 8: the model of examples/gpt2.py through Megatron-LM 0.19, which builds it anew. Further arguments are handed on.
#   MEGATRON_LM=<folder of Megatron-LM> advice/plan-1/megatron/pretrain.sh
# Yours to set: data and tokenizer (made up here), learning rate and steps.
# Attention is causal and norms come before attention and feed-forward, as in GPT and Llama.
set -euo pipefail

arguments=(
  # the model
  --num-layers 12
  --hidden-size 768
  --ffn-hidden-size 3072
  --num-attention-heads 12
  --seq-length 1024
  --max-position-embeddings 1024
  --position-embedding-type learned_absolute
  --normalization LayerNorm
  --vocab-size 50257
  --tokenizer-type NullTokenizer
  # how it is spread
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  # training
  --micro-batch-size 4
  --global-batch-size 64
  --fp16
  --clip-grad 1.0
  --optimizer adam
  --lr 0.0003
  --train-iters 1000
  --mock-data
)
: "${MEGATRON_LM:?set it to the folder of Megatron-LM}"
exec torchrun --standalone --nproc-per-node 8 "$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" "$@"
