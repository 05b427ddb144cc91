"""Operators and kernels land in the class a reader would expect, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from advisor.classify.operators import copy_class, kernel_class, operator_class
from cost_models.types import OP_CLASSES

KERNELS = [
    line.split("\t")
    for line in (Path(__file__).parent / "kernel_names.tsv").read_text(encoding="utf8").splitlines()
    if not line.startswith("#")
]

OPERATORS = {
    "convolution": ["aten.convolution", "aten.convolution_backward", "aten::cudnn_convolution", "aten.mkldnn_convolution", "aten._convolution",
                    "aten.conv2d", "aten.conv_transpose2d", "aten.slow_conv_dilated2d", "ConvolutionBackward0"],
    "matmul": ["aten.mm", "aten.addmm", "aten.addmm.default", "aten::bmm", "aten.baddbmm", "aten.linear", "aten.matmul", "aten._scaled_mm",
               "aten._grouped_mm", "aten.mv", "aten.einsum", "autograd::engine::evaluate_function: AddmmBackward0", "aten._int_mm"],
    "attention": ["aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward",
                  "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention_backward",
                  "aten._flash_attention_forward", "aten.scaled_dot_product_attention", "flash_attn::_flash_attn_forward",
                  "ScaledDotProductFlashAttentionBackward0"],
    "embedding": ["aten.embedding", "aten.embedding_dense_backward", "aten._embedding_bag", "EmbeddingBackward0",
                  "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"],
    "normalization": ["aten.native_batch_norm", "aten.native_layer_norm_backward", "aten.native_group_norm", "aten._fused_rms_norm",
                      "aten.cudnn_batch_norm_backward", "aten._native_batch_norm_legit_functional", "aten.batch_norm_backward",
                      "NativeLayerNormBackward0"],
    "elementwise": ["aten.add", "aten.mul_", "aten.gelu_backward", "aten.silu", "aten.threshold_backward", "aten.native_dropout", "aten.where",
                    "aten.masked_fill", "aten.zeros_like", "aten.fill_", "aten.pow", "aten.rsqrt", "aten.sigmoid_backward", "aten.upsample_nearest2d",
                    "aten.bernoulli_", "aten.__and__", "aten.tanh", "aten.addcmul", "aten.hardtanh_backward", "torch::autograd::AccumulateGrad"],
    "reduction": ["aten.sum", "aten.mean", "aten._softmax", "aten._log_softmax_backward_data", "aten.nll_loss_forward", "aten.nll_loss_backward",
                  "aten.max_pool2d_with_indices", "aten._adaptive_avg_pool2d_backward", "aten.index_add", "aten.index_select", "aten.scatter_add",
                  "aten.gather", "aten.cumsum", "aten.topk", "aten.logsumexp", "aten.linalg_vector_norm", "aten.index_put", "aten.sort",
                  "MaxPool2DWithIndicesBackward0", "aten.mse_loss_backward", "aten.var_mean", "ExpandBackward0"],
    "recurrent": ["aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward", "aten._thnn_fused_lstm_cell", "aten._thnn_fused_lstm_cell_backward_impl",
                  "aten._cudnn_rnn", "aten._cudnn_rnn_backward", "aten.lstm", "aten._thnn_fused_gru_cell", "aten.miopen_rnn", "ThnnFusedLstmCellBackward0"],
    "optimizer": ["aten._fused_adamw_", "aten._foreach_add_", "aten._foreach_norm", "aten._amp_foreach_non_finite_check_and_unscale_"],
    "copy-same-device": ["aten.copy_", "aten._to_copy", "aten.clone", "aten.cat", "aten.constant_pad_nd", "aten.stack", "aten.slice_backward",
                         "aten.split_with_sizes_copy", "aten.repeat", "UnsafeSplitBackward0", "SplitWithSizesBackward0"],
    "collective": ["c10d::allreduce_", "c10d._allgather_base_", "_c10d_functional.all_reduce", "_c10d_functional::wait_tensor", "nccl:all_reduce",
                   "gloo:all_reduce", "record_param_comms", "c10d::send"],
    "other": ["aten.view", "aten.t", "aten.detach", "mylib::my_operator", "aten.as_strided", "fbgemm::something_new", ""],
}  # fmt: skip

#: Kernels in no trace at hand: names as the libraries' sources or their users' profiles print them.
MORE_KERNELS = {
    "attention": ["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 32, 4, false, false, cutlass::bfloat16_t>>",
                  "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
                  "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
                  "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0", "attn_fwd",
                  "triton_tem_fused_flex_attention_0"],
    "matmul": ["nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
               "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "void gemv2T_kernel_val<int, int, float, float>",
               "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "triton_tem_fused_addmm_relu_3"],
    "convolution": ["sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3",
                    "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true>", "void at::native::im2col_kernel<float>",
                    "igemm_wrw_gtcx_nhwc_fp16_bx0_ex0_bt128x128x16"],
    "normalization": ["MIOpenBatchNormFwdTrainSpatial", "void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float>",
                      "void at::native::RowwiseMomentsCUDAKernel<float>", "triton_per_fused_add_native_layer_norm_2",
                      "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel"],
    "reduction": ["void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>", "triton_red_fused__log_softmax_5",
                  "void at::native::(anonymous namespace)::indexFuncLargeIndex<float, long, unsigned int, 2, 2, -2, true, at::native::ReduceAdd>",
                  "void at::native::_scatter_gather_elementwise_kernel<128, 4, at::native::_cuda_scatter_gather_internal_kernel<true, float>>"],
    "elementwise": ["triton_poi_fused_addmm_relu_threshold_backward_3", "triton_poi_fused_gelu_1", "Memset (Device)",
                    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
                    "__amd_rocclr_fillBufferAligned"],
    "copy-same-device": ["void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda>>",
                         "triton_poi_fused__to_copy_2", "triton_poi_fused_cat_0", "__amd_rocclr_copyBuffer", "Memcpy DtoD (Device -> Device)"],
    "copy-device-to-device": ["Memcpy PtoP (Device -> Device)"],
    "embedding": ["void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>", "triton_poi_fused_embedding_0"],
    "recurrent": ["void LSTM_elementWise_fp<__half, __half, float>", "RNN_blockPersist_fp_LSTM<float, float, float, 128>",
                  "void at::native::(anonymous namespace)::kernel::lstm_cell_forward<float, float, int, 1>"],
    "optimizer": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",
                  "void multi_tensor_apply_kernel<TensorListMetadata<2>, L2NormFunctor<float>>"],
    "collective": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
                   "void vllm::cross_device_reduce_2stage<float, 8>"],
    "other": ["my_very_own_kernel(float*)"],
}  # fmt: skip


@pytest.mark.parametrize(("op_class", "name"), [(c, n) for c, names in OPERATORS.items() for n in names])
def test_operator_class(op_class: str, name: str):
    assert operator_class(name) == op_class


@pytest.mark.parametrize(("op_class", "trace", "name"), KERNELS)
def test_kernel_of_a_real_trace(op_class: str, trace: str, name: str):
    assert kernel_class(name) == op_class, trace


@pytest.mark.parametrize(("op_class", "name"), [(c, n) for c, names in MORE_KERNELS.items() for n in names])
def test_kernel_of_another_library(op_class: str, name: str):
    assert kernel_class(name) == op_class


def test_a_kernel_name_may_stand_for_an_operator():
    assert operator_class("volta_sgemm_128x32_nt") == "matmul"
    assert operator_class("triton_poi_fused_gelu_1") == "elementwise"


@pytest.mark.parametrize(
    ("copy_from", "copy_to", "op_class"),
    [
        ("cpu", "cuda:0", "copy-host-to-device"),
        ("cuda:1", "cpu", "copy-device-to-host"),
        ("cuda:0", "cuda:1", "copy-device-to-device"),
        ("cuda:0", "cuda:0", "copy-same-device"),
        ("cuda", "cuda:0", "copy-same-device"),
        ("cpu", "cpu", "copy-same-device"),
        ("", "cuda:0", "copy-same-device"),
        ("", "", "copy-same-device"),
    ],
)
def test_copies_are_told_apart_by_their_devices(copy_from: str, copy_to: str, op_class: str):
    assert copy_class(copy_from, copy_to) == op_class
    for name in ("aten.copy_", "aten._to_copy", "aten.to"):
        assert operator_class(name, copy_from=copy_from, copy_to=copy_to) == op_class


def test_optimizer_phase_keeps_collectives_and_cross_device_copies_apart():
    assert operator_class("aten.mul_", phase="optimizer") == "optimizer"
    assert operator_class("aten.copy_", phase="optimizer") == "optimizer"
    assert operator_class("c10d::allreduce_", phase="optimizer") == "collective"
    assert operator_class("aten.copy_", phase="optimizer", copy_from="cuda:0", copy_to="cpu") == "copy-device-to-host"


def test_every_class_but_idle_is_reachable():
    reached = set(OPERATORS) | set(MORE_KERNELS) | {"copy-host-to-device", "copy-device-to-host"}
    assert reached == set(OP_CLASSES) - {"idle"}


def test_classifying_does_not_import_torch_or_pandas():
    code = "import sys; import advisor.classify.operators as o; o.operator_class('aten.mm'); print({'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
