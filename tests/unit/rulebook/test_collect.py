"""Facts: computed from small hand-made values whose answers can be checked by hand."""

import numpy as np
import pytest

from advisor.profiling.schema import ProfileMeta
from advisor.report.report import Hotspot
from advisor.rulebook import FACTS, collect_facts
from advisor.search.types import Candidate, Rejected, SearchResult
from cost_models.catalogue import find_gpu, find_link
from cost_models.types import MEMORY_PARTS, TIME_PARTS, Cluster, LayerGroup, OpTable, OptimizerSpec, Plan, Workload

NO_OPS = OpTable(**{name: np.zeros(2) for name in OpTable.__dataclass_fields__ if name != "num_kernels"}, num_kernels=np.array([3.0, 7.0]))


def workload(**changes):
    group = LayerGroup(
        name="layers.*",
        num_repeats=10,
        ops=NO_OPS,
        num_params=1e8,
        num_trainable_params=1e8,
        saved_inner_bytes=1e6,
        saved_other_bytes=1e6,
        can_cut=True,
    )
    fields = {
        "name": "M", "groups": (group,), "num_params": 1e9, "num_trainable_params": 1e9, "optimizer": OptimizerSpec(name="adamw", state_bytes_per_param=8),
        "num_heads": 16, "num_kv_heads": 4, "vocab_size": 50_000, "hidden_size": 1000, "logits_bytes": 2e7, "can_pipeline": True,
    }  # fmt: skip
    return Workload(**{**fields, **changes})


def cluster(nodes=2, inter="ib-hdr-4x"):
    return Cluster(device=find_gpu("a100-sxm-80gb"), gpus_per_node=8, num_nodes=nodes, intra=find_link("nvlink-3"), inter=find_link(inter))


def candidate(plan, step_s, memory_bytes=4e10, **parts):
    breakdown = {**dict.fromkeys(TIME_PARTS, 0.0), **parts}
    bytes_ = {**dict.fromkeys(MEMORY_PARTS, 0.0), "activations": memory_bytes / 2}
    estimate = {"step_time_s": step_s, "peak_memory_bytes": memory_bytes, "high_memory_bytes": memory_bytes * 1.1}
    return Candidate(plan=plan, estimate=estimate, breakdown_s=breakdown, breakdown_bytes=bytes_)


FSDP = candidate(Plan(dp_shard_degree=16, zero_stage=3, micro_batch=2, num_microbatches=4), 2.0, fsdp_communication=0.5)
HSDP = candidate(Plan(dp_replicate_degree=2, dp_shard_degree=8, zero_stage=3), 2.2, memory_bytes=5e10)
TP = candidate(Plan(tp_degree=8, dp_replicate_degree=2), 3.0)
PP = candidate(Plan(pp_degree=4, virtual_stages=1, dp_replicate_degree=4, schedule="1f1b"), 4.0, pipeline_bubble=1.0)
NO_DDP = Rejected(plan=Plan(dp_replicate_degree=16), reason="does not fit", needed_bytes=9e10, available_bytes=8e10)
RESULT = SearchResult(candidates=(FSDP, HSDP, TP, PP), rejected=(NO_DDP,), num_priced=9, search_time_s=0.1)


def facts(meta=None, hotspots=(), result=RESULT, shape=None, machine=None):
    return collect_facts(
        meta=meta or ProfileMeta(script="x.py"),
        hotspots=hotspots,
        workload=shape or workload(),
        cluster=machine or cluster(),
        result=result,
    )


def spot(op_class, share, bound="compute"):
    return Hotspot(op_class=op_class, time_share=share, time_s=share, flops=1, bytes=1, achieved_flops_per_s=1, roofline_share=1, bound_by=bound,
                   num_calls=1, source="modelled")  # fmt: skip


def test_only_listed_facts_with_the_listed_kind_of_value():
    found = facts(hotspots=(spot("matmul", 1.0),))
    assert set(found) <= set(FACTS)
    for name, value in found.items():
        wanted = {"text": str, "flag": bool}.get(FACTS[name].unit)
        assert isinstance(value, wanted) if wanted else isinstance(value, int | float) and not isinstance(value, bool), name


def test_states_by_hand():
    found = facts()
    # bf16 weights 2, gradients 2, master 4, Adam 8 bytes a parameter
    assert found["states_bytes"] == pytest.approx(16e9) and found["optimizer_states_share"] == pytest.approx(12 / 16)
    assert found["zero1_saving_share"] == pytest.approx(12 / 16 * 15 / 16)
    assert found["zero3_saving_share"] == pytest.approx(15 / 16)
    assert found["logits_share_of_activations"] == pytest.approx(2e7 / 4e7)
    assert found["embedding_params_share"] == pytest.approx(0.1)
    assert facts(shape=workload(tied_params=5e7))["embedding_params_share"] == pytest.approx(0.05)


def test_links_by_hand():
    found = facts()
    assert found["link_ratio"] == pytest.approx(300 / (100 / 8))
    assert found["sharded_traffic_bytes"] == pytest.approx(6e9 / 2) and found["sharded_traffic_s"] == pytest.approx(0.03)
    assert found["network_has_rdma"] is True
    assert facts(machine=cluster(inter="ethernet-10g"))["network_has_rdma"] is False
    assert "link_ratio" not in facts(machine=cluster(nodes=1))


def test_families_by_hand():
    found = facts()
    assert found["best_plan_label"] == "FSDP 16" and found["best_plan_gather_share"] == pytest.approx(0.25)
    assert found["best_tp_plan_slowdown_share"] == pytest.approx(0.5) and found["best_pp_plan_slowdown_share"] == pytest.approx(1.0)
    assert found["hsdp_saves_s"] == pytest.approx(-0.2) and found["hsdp_extra_bytes"] == pytest.approx(1e10)
    assert found["ddp_fits"] is False and found["ddp_short_by_bytes"] == pytest.approx(1e10)
    assert "zero1_fits" not in found and "best_ddp_plan_label" not in found
    assert found["global_batch"] == 128 and found["samples_per_gpu"] == 8


def test_a_family_that_is_illegal_is_not_said_to_be_too_big():
    illegal = Rejected(plan=Plan(tp_degree=16), reason="not possible")
    found = facts(result=SearchResult(candidates=(FSDP,), rejected=(illegal,), num_priced=1, search_time_s=0.1))
    assert "tp_fits" not in found


def test_no_candidate_leaves_plan_facts_out():
    found = facts(result=SearchResult(candidates=(), rejected=(NO_DDP,), num_priced=1, search_time_s=0.1))
    assert not any(name.startswith("best_plan") for name in found) and found["ddp_fits"] is False


def test_hotspots_by_class_and_bound():
    found = facts(hotspots=(spot("matmul", 0.6), spot("normalization", 0.3, "memory"), spot("idle", 0.1, "host")))
    assert found["matmul_time_share"] == 0.6 and found["convolution_time_share"] == 0
    assert found["memory_bound_share"] == 0.3 and found["mean_kernel_s"] == pytest.approx(0.9 / 100)
    assert "matmul_time_share" not in facts()


def test_hazards_with_their_evidence():
    meta = ProfileMeta(script="x.py", hazards=[{"id": "batch-norm", "evidence": "53 layers"}, {"id": "of-tomorrow", "evidence": "?"}],
                       tied=[["a.weight", "b.weight"]], num_optimizers=2, other_models={"EMA": 10})  # fmt: skip
    found = facts(meta)
    assert found["has_batch_norm"] is True and found["batch_norm_evidence"] == "53 layers"
    assert found["tied_weights_evidence"] == "a.weight = b.weight" and found["has_several_optimizers"] is True
    assert found["has_host_sync"] is False and "host_sync_evidence" not in found
    assert found["other_model_params"] == 10


def test_idle_only_where_measured():
    assert "idle_share" not in facts()
    assert facts(ProfileMeta(script="x.py", step_time_s=2.0, idle_s=0.5))["idle_share"] == 0.25
