"""The closed list of things a rule may tell people to do; a rule names ids, reports show the sentences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ACTIONS: Mapping[str, str] = MappingProxyType({
    # strategy
    "follow-ranking": "Take the ranking's first plan; this rule of thumb is weaker evidence.",
    "scale-out": "Scale out with data parallelism as long as every GPU keeps large products.",
    "compare-stages": "Compare the stages by these shares, not by fixed percentages.",
    "use-data-parallel": "Start with plain data parallelism (DDP) and scale the batch.",
    "use-zero-1": "Shard the optimizer states (ZeRO-1, or ZeroRedundancyOptimizer).",
    "use-sharded-data-parallel": "Shard parameters, gradients and optimizer states (FSDP or ZeRO-3).",
    "use-hybrid-sharding": "Shard inside the node and replicate between nodes (HSDP: a 2-D mesh for fully_shard).",
    "use-tensor-parallel-in-node": "Keep tensor parallelism inside a node; put data parallelism or stages between nodes.",
    "use-pipeline-between-nodes": "Cut the model into stages between nodes and keep tensor parallelism inside them.",
    "shard-vocabulary": "Under tensor parallelism shard embedding and head over the vocabulary, with a parallel loss.",
    "use-expert-parallel": "Place whole experts on ranks (expert parallelism) and shard the rest over data ranks.",
    "use-fewer-gpus": "Use fewer GPUs, or a larger global batch on the same ones.",
    "place-tables": "Place the embedding tables over the GPUs and replicate the dense part.",
    # memory
    "keep-states-whole": "Don't shard optimizer states for memory's sake; shard parameters, or nothing.",
    "use-recomputation": "Recompute activations (activation checkpointing): selective first, then full.",
    "split-the-sequence": "Split the sequence over ranks: sequence parallelism beside tensor parallelism, or context parallelism.",
    "use-accumulation": "Take smaller micro-batches and accumulate gradients over more of them.",
    "chunk-loss": "Compute logits and loss in chunks, or with a fused cross-entropy, so that the full logits never exist.",
    "offload-optimizer": "Keep only the optimizer states on the host (DeepSpeed offload_optimizer); leave parameters on the GPU.",
    "add-gpus-before-offload": "Add GPUs or shard further before putting anything on the host.",
    "keep-memory-free": "Leave a margin: a smaller micro-batch, recomputation, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    "build-on-meta": "Build the model on the meta device, shard it, then load weights shard by shard.",
    # pipeline
    "raise-microbatches": "Use more micro-batches per step, or interleaved stages.",
    "balance-stages": "Cut stages by cost, not by count: give the stage with embedding or head fewer layers.",
    "lower-tp-degree": "Use a tensor-parallel degree that divides the key and value heads.",
    # speed
    "lower-launches": "Launch less: torch.compile, CUDA graphs, fused optimizers, a larger micro-batch.",
    "fuse-memory-bound": "Fuse element-wise and normalization kernels: torch.compile, fused norms, fused optimizers.",
    "feed-the-device": "Give the data loader more workers and pinned memory, and copy with non_blocking=True.",
    "defer-sync": "Keep values on the device; read the loss every hundred steps only.",
    "overlap-gathers": "Let the next layer's parameters be gathered early (FSDP prefetch) and wrap whole blocks.",
    "tune-buckets": "Set bucket_cap_mb near the size of the gradients so that several buckets overlap with backward.",
    "compress-gradients": "Try a DDP communication hook (bf16_compress_hook or PowerSGD), checking the loss.",
    "accumulate-locally": "Accumulate more before each gradient exchange (no_sync), so that it happens less often.",
    "widen-network": "Use a faster or less shared network: adapters with RDMA, one per GPU or two.",
    # correctness
    "sync-batch-norm": "Convert with torch.nn.SyncBatchNorm.convert_sync_batchnorm, or keep enough samples per rank.",
    "tie-across-stages": "Keep both uses of the tensor on one stage, or add up its gradients between the two stages.",
    "freeze-unused": "Freeze the parameters named, or remove them; find_unused_parameters=True only as a last resort.",
    "split-by-sequence": "Give each rank whole sequences and carry its own state; reset it where the sampler does.",
    "wrap-each-model": "Wrap each network by itself and keep the order of the backward passes the same on all ranks.",
    "replicate-ema": "Update the copy from the sharded parameters, or shard it in the same way.",
    "start-from-plain": "Take the script's own wrapper and launch away before using the generated files, or the model is wrapped twice.",
    "mix-frozen": "Shard with fully_shard, or FSDP1 with use_orig_params=True, so that frozen and trained parameters may share a unit.",
    "undo-placement": "Put the whole model on one device per rank and leave spreading it to the plan, which is priced for that; kept as it is, DDP "
    "needs device_ids=None and as many GPUs for each rank as the model has devices.",
    "guard-start": "Start the process group inside main(), under `if __name__ == '__main__'`, so that workers don't start it again.",
    "share-cores": "Keep workers per process times GPUs per node below the CPU's cores.",
    "allow-reuse": "Use static_graph=True with DDP for modules called several times; keep them on one stage.",
    "gather-negatives": "Gather the features of all ranks before the loss, with gradients, if the method needs the global batch.",
    "keep-graph-dynamic": "Leave static_graph off, and join ranks with uneven inputs (Join, or equal batches).",
    "drop-device-map": "Load without device_map and launch one process per GPU with torchrun.",
    "use-stages": "Replace the hand-made split by pipeline stages, or by sharding, which keeps all devices busy.",
    "check-custom-backward": "Check the custom function under sharding: it must accept DTensors and save what it needs itself.",
    "check-optimizer": "Let the update work on local shards, or move it to a torch.optim optimizer, which the engines shard.",
    "seed-by-rank": "Seed equally inside a tensor-parallel group for replicated dropout, differently across data ranks.",
    "scale-learning-rate": "Scale warm-up with the batch and check the final loss; learning rates don't carry over by themselves.",
    "use-mixed-precision": "Run matrix products in bf16 (torch.autocast), or allow tf32 with torch.set_float32_matmul_precision.",
    "use-fp16-scaler": "Train in fp16 with a dynamic loss scale (GradScaler), or on GPUs that have bf16.",
})  # fmt: skip
