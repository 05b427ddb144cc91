"""Cuts between pipeline stages."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import TransformerShape, stage_split, transformer_workload
from cost_models.convnet import resnet50_workload
from cost_models.stages import forward_cost


def costs(workload, split):
    return split.counts @ np.array([forward_cost(g) for g in workload.groups])


@pytest.mark.parametrize("cut", ["balanced", "even", "greedy"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7, 16])
def test_every_layer_is_in_exactly_one_stage(llama8b, cut, num_stages):
    split = stage_split(llama8b, num_stages, cut=cut)
    assert split.counts.sum(axis=0).tolist() == [g.num_repeats for g in llama8b.groups]
    assert (split.counts.sum(axis=1) > 0).all()
    assert split.counts[0, 0] == 1
    assert split.counts[-1, -1] == 1
    assert len(split.boundary_group) == num_stages - 1


def test_greedy_stages_end_with_the_piece_that_reaches_their_share(llama8b):
    """32 layers of 218.1 M weights and a head of 525.3 M: a quarter is 8.6 layers."""
    assert stage_split(llama8b, 4, cut="greedy").counts[:, 1].tolist() == [9, 9, 8, 6]


def test_greedy_cuts_leave_the_head_to_the_last_stage():
    workload = transformer_workload(
        TransformerShape(num_layers=16, hidden_size=2048, num_heads=32, vocab_size=131072, seq_len=4096, ffn_size=8192, gated=True)
    )
    counts = stage_split(workload, 8, cut="greedy").counts
    assert counts[:, 1].tolist() == [3, 2, 3, 2, 3, 2, 1, 0]
    assert counts[:, 2].tolist() == [0] * 7 + [1]


def test_even_stages_differ_by_one_layer_at_most(llama8b):
    assert stage_split(llama8b, 5, cut="even").counts[:, 1].tolist() == [7, 7, 6, 6, 6]


def test_a_large_vocabulary_takes_layers_off_the_last_stage(llama8b):
    blocks = stage_split(llama8b, 4).counts[:, 1]
    assert blocks[-1] < blocks.max()
    assert costs(llama8b, stage_split(llama8b, 4)).max() < costs(llama8b, stage_split(llama8b, 4, cut="even")).max()


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(3, 8), vocab=st.integers(100, 200_000), num_stages=st.integers(2, 4))
def test_balanced_cuts_are_optimal(layers, vocab, num_stages):
    workload = transformer_workload(TransformerShape(num_layers=layers, hidden_size=256, num_heads=4, vocab_size=vocab, seq_len=128))
    unit = [forward_cost(g) for g in workload.groups]
    pieces = [unit[0] + unit[1], *[unit[1]] * (layers - 1), unit[2]]
    best = min(
        max(sum(pieces[a:b]) for a, b in itertools.pairwise((0, *cuts, len(pieces))))
        for cuts in itertools.combinations(range(1, len(pieces)), num_stages - 1)
    )
    assert costs(workload, stage_split(workload, num_stages)).max() == pytest.approx(best, rel=1e-6)


def test_ragged_models_are_cut_by_cost():
    workload = resnet50_workload()
    stages = costs(workload, stage_split(workload, 2))
    assert stages.max() < 0.65 * stages.sum()


def test_more_stages_than_layers_leave_the_last_ones_empty(small_gpt):
    counts = stage_split(small_gpt, 8).counts
    assert counts.sum() == 6
    assert counts.shape[0] == 8


@pytest.mark.parametrize(("num_stages", "cut", "word"), [(0, "even", "num_stages"), (2, "sideways", "sideways")])
def test_bad_arguments_are_named(small_gpt, num_stages, cut, word):
    with pytest.raises(ValueError, match=word):
        stage_split(small_gpt, num_stages, cut=cut)
