"""The examples at their real size under plans of every kind: what golden files and unit tests are made from."""

from __future__ import annotations

from pathlib import Path

from advisor.engines import EngineInput
from advisor.profiling.schema import ProfileMeta
from cost_models.types import Plan

REPOSITORY = Path(__file__).parents[3]


def gpt2(plan: Plan, **more) -> EngineInput:
    meta = ProfileMeta(**{
        "script": "examples/gpt2.py", "num_params": 124_439_808, "num_trainable_params": 124_439_808,
        "tied": [["tokens.weight", "head.weight"]], "optimizer": "adamw", "batch_size": 8, "clips_gradients": True, **more.pop("meta", {}),
    })  # fmt: skip
    return _input(plan, meta, [f"blocks.{i}" for i in range(12)], **more)


def llama(plan: Plan, **more) -> EngineInput:
    meta = ProfileMeta(
        script="examples/llama3_8b.py", num_params=8_030_261_248, num_trainable_params=8_030_261_248, optimizer="adamw", batch_size=1,
        clips_gradients=True, param_dtype="bf16", **more.pop("meta", {}),
    )  # fmt: skip
    pairs = [
        {"column": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "row": ["self_attn.o_proj"], "attention": True},
        {"column": ["mlp.gate_proj", "mlp.up_proj"], "row": ["mlp.down_proj"]},
    ]
    return _input(plan, meta, [f"model.layers.{i}" for i in range(32)], precision="bf16", pairs=pairs, **more)


def resnet(plan: Plan, **more) -> EngineInput:
    meta = ProfileMeta(
        script="examples/resnet50.py", form="functions", num_params=25_557_032, num_trainable_params=25_557_032, optimizer="sgd",
        batch_size=64, buffer_bytes=212_692, **more.pop("meta", {}),
    )  # fmt: skip
    return _input(plan, meta, [f"stages.{i}.{j}" for i, count in enumerate((3, 4, 6, 3)) for j in range(count)], **more)


def _input(
    plan: Plan, meta: ProfileMeta, blocks: list[str], *, pairs: list[dict] | None = None, model: dict | None = None, **more
) -> EngineInput:
    per_node = min(8, plan.world_size)
    return EngineInput(
        plan=plan, script=meta.script, form=meta.form, meta=meta, num_nodes=plan.world_size // per_node, gpus_per_node=per_node, gpu="h100-sxm-80gb",
        model={"block_paths": blocks, "tp_pairs": pairs or [], **(model or {})}, folder="advice/plan-1", **more,
    )  # fmt: skip


CASES = {
    "ddp": gpt2(Plan(dp_replicate_degree=8, micro_batch=8, runtime="torch-ddp")),
    "ddp-accumulate-recompute": gpt2(Plan(dp_replicate_degree=8, micro_batch=2, num_microbatches=4, recompute="selective", runtime="torch-ddp"),
                                     script_args=("--steps", "400"), precision="bf16"),
    "zero1": gpt2(Plan(dp_shard_degree=8, micro_batch=8, zero_stage=1, runtime="deepspeed-zero")),
    "zero2": resnet(Plan(dp_shard_degree=8, micro_batch=32, num_microbatches=2, zero_stage=2, runtime="deepspeed-zero"), precision="bf16"),
    "zero3-two-nodes": llama(Plan(dp_shard_degree=16, zero_stage=3, recompute="full", runtime="fsdp2")),
    "zero3-functions": resnet(Plan(dp_shard_degree=8, micro_batch=32, zero_stage=3, runtime="fsdp2")),
    "hsdp": llama(Plan(dp_replicate_degree=2, dp_shard_degree=8, num_microbatches=2, zero_stage=3, runtime="fsdp2")),
    "offload": gpt2(Plan(dp_shard_degree=4, micro_batch=8, zero_stage=3, offload=True, runtime="fsdp2"), precision="bf16"),
    "tensor": llama(Plan(tp_degree=4, dp_shard_degree=4, zero_stage=3, sequence_parallel=True, recompute="selective", runtime="torch-tp")),
    "single": gpt2(Plan(micro_batch=8, num_microbatches=2, runtime="torch-ddp")),
}  # fmt: skip
