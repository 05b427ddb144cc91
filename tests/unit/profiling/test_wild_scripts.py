"""Scripts as people write them: each holds several habits that a trace without values or a world of one process must live with."""

import pytest

from advisor.profiling import StepProfile, flops

NET = "# with Net\n"  # see conftest.py
SCRIPTS = {
    "lengths": NET + """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(50, 64, mode="sum", sparse=True)
        self.conv = nn.Conv1d(64, 64, 3, padding=1, groups=64)
        self.lstm = nn.LSTM(64, 48, 2, batch_first=True, bidirectional=True)
        self.out, self.policy = nn.Linear(96, 30), nn.Linear(96, 4)

    def forward(self, x, ids, lengths):
        x = self.conv((x + self.table(ids)[:, None]).transpose(1, 2)).transpose(1, 2)
        x, lengths = pad_packed_sequence(self.lstm(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))[0], True)
        return self.out(x).log_softmax(-1), torch.distributions.Categorical(logits=self.policy(x[:, 0])), lengths

model = Speech().cuda()
rest = [p for n, p in model.named_parameters() if not n.startswith("table")]
dense, sparse = torch.optim.SGD(rest, 0.1), torch.optim.SparseAdam(list(model.table.parameters()))
for _ in range(3):
    x, lengths = torch.randn(8, 100, 64).cuda(), torch.tensor([100, 90, 90, 50, 20, 70, 60, 10])
    scores, chosen, ends = model(x, torch.randint(50, (8, 3)).cuda(), lengths)
    loss = F.ctc_loss(scores.transpose(0, 1), torch.randint(1, 30, (8, 5)).cuda(), ends, torch.full((8,), 5))
    loss = loss + chosen.entropy().mean() + scores[torch.arange(100)[None] < lengths[:, None]].pow(2).mean()
    if not torch.isfinite(loss):
        continue
    dense.zero_grad(); sparse.zero_grad()
    loss.backward()
    dense.step(); sparse.step()
""",
    "sharded": NET + """
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
torch.distributed.init_process_group("nccl", rank=int(os.environ["RANK"]))
with torch.device("meta"):
    model = Net(width=64)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy).to_empty(device="cuda")
if not isinstance(model, FSDPModule):
    raise SystemExit("not sharded")
model.set_requires_gradient_sync(True)
handle = model.unshard(async_op=True)
handle.wait()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "inner_steps": NET + """
import copy
from torch.func import functional_call

def main():
    model = Net().cuda()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        for _ in range(4):
            weights, x = dict(model.named_parameters()), torch.randn(8, 32, device="cuda")
            grads = torch.autograd.grad(functional_call(model, weights, (x,)).sum(), weights.values(), create_graph=True)
            weights = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads)}
            functional_call(model, weights, (x,)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(average.parameters(), model.parameters()):
            p.data.lerp_(q.data, 0.1)

main()
""",
    "in_backward": NET + """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.act = nn.Linear(64, 64), torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.GELU()))

    def forward(self, x, mask):
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return self.act(flex(q, q, q, block_mask=mask).transpose(1, 2).flatten(2))

flex = torch.compile(flex_attention)
model = Block().cuda()
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cuda")
for _ in range(3):
    model(torch.randn(2, 512, 64, device="cuda"), mask).sum().backward()
""",
    "copies": NET + """
model = Net().to("cuda", torch.bfloat16)
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters)
for _ in range(3):
    model(torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)).sum().backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float()
    optimizer.step()
    for master, p in zip(masters, model.parameters()):
        p.data.copy_(master)
        p.grad = None
""",
    "in_turn": NET + """
sn = nn.utils.parametrizations.spectral_norm
painter, judge = Net().cuda(), nn.Sequential(sn(nn.Linear(10, 16)), nn.ReLU(), nn.Linear(16, 1)).cuda()
first, second = torch.optim.Adam(painter.parameters()), torch.optim.Adam(judge.parameters())
for _ in range(3):
    judge.requires_grad_(False)
    fake = painter(torch.randn(12, 32, device="cuda"))
    judge(fake).mean().backward()
    first.step(); first.zero_grad()
    judge.requires_grad_(True)
    (judge(torch.randn(12, 10, device="cuda")).mean() - judge(fake.detach()).mean()).backward()
    second.step(); second.zero_grad()
""",
    "sequence_first": """
import torch
from torch import nn

class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(100, 32), nn.Transformer(32, 4, 1, 1, 64), nn.Linear(32, 100)

    def forward(self, source, target):
        return self.head(self.body(self.table(source), self.table(target)))

model = Translator().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    ids = torch.randint(100, (20, 6), device="cuda")
    nn.functional.cross_entropy(model(ids, ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "no_file": NET + "model = Net().cuda()\nmodel.load_state_dict(torch.load('weights/best.pth'))\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(capture_all):
    results, _ = capture_all(SCRIPTS)
    return results


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"no_file"}))
def test_a_step_is_seen_without_computing_it(seen, name):
    assert isinstance(seen[name], StepProfile), seen[name]
    assert not [w for w in seen[name].meta.warnings if "real tensors" in w or "half of every" in w]


def hazards(profile):
    return {h["id"]: h["evidence"] for h in profile.meta.hazards}


def test_packed_sequences_count_their_own_positions_only(seen):
    operators = seen["lengths"].operators
    lstm = operators[(operators["operator"] == "aten.lstm") & (operators["phase"] == "forward")]
    weights = 2 * (4 * 48 * (64 + 48)) + 2 * (4 * 48 * (96 + 48))
    assert lstm["flops"].tolist() == [2 * 490 * weights]  # lengths sum up to 490 of 800
    assert lstm["num_kernels"].tolist() == [8 * 100]


def test_a_depthwise_convolution_does_twice_its_forward_work_in_backward(seen):
    operators = seen["lengths"].operators
    work = operators[operators["op_class"] == "convolution"].groupby("phase")["flops"].sum()
    assert work["forward"] == 2 * 8 * 100 * 64 * 3
    assert work["backward"] == 2 * work["forward"]


def test_sparse_gradients_are_named(seen):
    assert hazards(seen["lengths"])["sparse-gradients"] == "1 parameters have sparse gradients: table.weight"


def test_a_sharded_module_computes_in_its_policys_precision(seen):
    meta = seen["sharded"].meta
    assert (meta.model_class, meta.autocast_dtype, meta.param_dtype, meta.batch_size) == ("Net", "bf16", "fp32", 8)
    assert "already-distributed" in hazards(seen["sharded"])


def test_what_a_function_holds_is_seen_after_it_has_ended(seen):
    meta = seen["inner_steps"].meta
    assert meta.other_models == {"Net": meta.num_params}
    assert "ema-copy" in hazards(seen["inner_steps"])
    assert meta.accumulation == 4


def test_optimizers_that_step_in_backward_end_the_step(seen):
    profile = seen["in_backward"]
    products = profile.operators[profile.operators["op_class"] == "matmul"]
    assert products["flops"].sum() == 5 * 2 * (2 * 512) * 64 * 64  # the input of the first layer wants no gradient
    assert {"optimizer", "forward", "backward"} <= set(profile.operators["phase"])
    attention = profile.operators[profile.operators["operator"].str.contains("scaled_dot_product")]
    assert attention["phase"].tolist() == ["forward", "backward"]
    assert profile.meta.num_heads == 4


def test_an_optimizer_of_copies_is_that_of_the_model(seen):
    meta = seen["copies"].meta
    assert (meta.model_class, meta.param_dtype, meta.optimizer, meta.other_models) == ("Net", "bf16", "adamw", {})
    assert meta.optimizer_state_bytes_per_param == 12.0  # two moments and the copy
    assert meta.num_params == 2 * (32 * 32 + 32) + 32 * 10 + 10


def test_a_model_frozen_for_half_of_a_step_is_trained(seen):
    meta = seen["in_turn"].meta
    assert meta.num_trainable_params == meta.num_params
    assert meta.batch_size == 12
    assert "frozen-parameters" not in hazards(seen["in_turn"])
    repeated = [part for part in hazards(seen["in_turn"])["shared-module-called-n-times"].split(", ") if "Sequential" in part]
    assert repeated == ["Sequential is called 3 times in one step"]


def test_sequences_may_come_before_samples(seen):
    meta = seen["sequence_first"].meta
    assert (meta.batch_size, meta.seq_len) == (6, 20)


def test_a_missing_file_is_named_with_where_it_was_looked_for(seen):
    assert "opens 'weights/best.pth', which isn't there" in seen["no_file"].message
    assert "Run the advisor in the folder that the path starts from" in seen["no_file"].hint


@pytest.mark.parametrize(("sides", "transposed", "macs"), [
    (((2, 8, 10), (2, 4, 12), (8, 4, 3)), False, 2 * 10 * 8 * 4 * 3),
    (((2, 6, 9, 9), (2, 6, 9, 9), (6, 1, 3, 3)), False, 2 * 81 * 6 * 9),
    (((2, 3, 20), (2, 8, 10), (8, 3, 2)), True, 2 * 10 * 8 * 3 * 2),
])  # fmt: skip
def test_each_gradient_of_a_convolution_takes_the_forwards_flops(sides, transposed, macs):
    import torch

    tensors = [torch.empty(shape, device="meta") for shape in sides]
    for wanted in ([True, True, False], [False, True, True], [False, False, True]):
        args = (*tensors, None, [1], [0], [1], transposed, [0], 1, wanted)
        found = flops.count(torch.ops.aten.convolution_backward, "aten.convolution_backward", args, {}, None)
        assert found == 2 * macs * sum(wanted[:2])
