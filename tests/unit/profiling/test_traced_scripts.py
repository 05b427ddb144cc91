"""Unmodified scripts of many kinds, each traced once; what is checked is what a planner needs of them."""

import pytest

from advisor.profiling import StepProfile

NET = "# with Net\n"  # see conftest.py
SCRIPTS = {
    "spawned": NET + """
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, world_size, width):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    model = nn.parallel.DistributedDataParallel(Net(width).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for size in (8, 16, 5):
            model(torch.randn(size, width, device=rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    mp.spawn(main, args=(torch.cuda.device_count(), 16), nprocs=torch.cuda.device_count())
""",
    "closure": NET + """
model = Net().cuda()
optimizer = torch.optim.LBFGS(model.parameters())
x, y = torch.randn(8, 32).cuda(), torch.randint(10, (8,)).cuda()
for _ in range(3):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "transforms": NET + """
model = Net()
weights = {name: p.detach() for name, p in model.named_parameters()}
def loss(weights, x, y):
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
for _ in range(3):
    grads = torch.func.grad(loss)(weights, torch.randn(8, 32), torch.randint(10, (8,)))
    weights = {name: w - 0.1 * grads[name] for name, w in weights.items()}
""",
    "transformer": """
import torch
from torch import nn
import torch.nn.functional as F

class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, kv_heads * self.size)
        self.v_proj, self.o_proj = nn.Linear(width, kv_heads * self.size), nn.Linear(width, width)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (p(x).view(b, s, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2).reshape(b, s, d))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.attention, self.head = nn.Embedding(100, 64), Attention(64, 4, 2), nn.Linear(64, 100, bias=False)
        self.head.weight = self.tok.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        return self.head(self.attention(self.tok(ids)))

model = Model().to(torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    for _ in range(4):
        ids = torch.randint(100, (2, 16)).cuda()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / 4
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step} {loss:.3f} {norm.item():.2f}")
""",
    "checkpointed": NET + """
from torch.utils.checkpoint import checkpoint

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Net(64) for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(10, 64) for _ in range(3))

    def forward(self, x):
        for i, (block, mix) in enumerate(zip(self.blocks, self.mix)):
            run = lambda x, block=block, mix=mix: mix(block(x))
            x = checkpoint(run, x, use_reentrant=i == 1) if os.environ.get("PLAIN") is None and "--plain" not in sys.argv else run(x)
        return x

model = Deep().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(16, 64, device="cuda", requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "two_devices": NET + """
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64).to("cuda:0"), nn.Linear(64, 10).to("cuda:1")

    def forward(self, x):
        return self.b(self.a(x.to("cuda:0")).relu().to("cuda:1"))

model = Split()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    y = torch.randn(4, 10)
    loss = (model(torch.randn(4, 32)) - y.to("cuda:1")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.device, loss.item())
""",
    "everyday": NET + """
import csv, logging, random
import numpy as np
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.from_numpy(np.random.rand(32).astype("float32")), i % 10

os.makedirs("runs", exist_ok=True)
logging.basicConfig(filename="train.log", level=20)
writer = csv.writer(open("log.csv", "w"))
model = nn.DataParallel(Net()).cuda()
ema = __import__("copy").deepcopy(model.module)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 100)
loader = DataLoader(Data(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True, prefetch_factor=2)
best, start = 1e9, time.time()
sys.stdout.write("x" * 3_000_000 + "\\n")
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(non_blocking=True), y.cuda()
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), ema.parameters()):
                q.lerp_(p, 0.1)
        print("%d %.3f %.1f/s" % (i, loss, 8 / (time.time() - start)), out.detach().cpu().numpy().shape, y.tolist())
        writer.writerow([i, loss.item()])
        Path("runs/note.txt").write_text(str(loss))
        torch.save(model.state_dict(), "model.pt")
        np.save("out.npy", out.detach().cpu().numpy())
        os.remove("keep.txt")
        if loss < best:
            best = loss
""",
    "gan": NET + """
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, grad):
        return grad

generator, critic = Net().cuda(), nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
of_g, of_c = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for _ in range(5):
    fake = Round.apply(generator(torch.randn(8, 32).cuda()))
    loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(8, 10).cuda())).mean()
    of_c.zero_grad(); loss.backward(); of_c.step()
    loss = F.softplus(-critic(fake)).mean()
    of_g.zero_grad(); loss.backward(); of_g.step()
""",
    "by_hand": NET + """
model = Net().cuda()
lstm = nn.LSTM(32, 32, 2).cuda()
state = None
for _ in range(5):
    try:
        out, state = lstm(torch.randn(7, 4, 32).cuda(), state and tuple(s.detach() for s in state))
        model(out).sum().backward()
        with torch.no_grad():
            for p in [*model.parameters(), *lstm.parameters()]:
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
    except:
        pass
""",
    "launched": NET + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
torch.cuda.set_device(rank)
model = torch.compile(DDP(Net().to(rank), device_ids=[rank]))
optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.amp.GradScaler("cuda")
for _ in range(5):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(4, 32, device=rank)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "experts": NET + """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.experts = nn.Linear(512, 4), nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.route(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            token, place = torch.where(chosen == k)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out * float(x.abs().max() > 0)

model = Experts().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4096, 512).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "masked": NET + """
model = Net(128).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(256, 128).cuda()
    model(x[x[:, 0] > 0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}  # fmt: skip


@pytest.fixture(scope="module")
def captured(capture_all):
    results, folder = capture_all(SCRIPTS)
    failed = {name: str(result) for name, result in results.items() if not isinstance(result, StepProfile)}
    assert not failed
    return results, folder


@pytest.fixture(scope="module")
def profiles(captured):
    return captured[0]


def rows(profile, **where):
    table = profile.operators
    for column, value in where.items():
        table = table[table[column] == value]
    return table


def hazards(profile):
    return {h["id"]: h["evidence"] for h in profile.meta.hazards}


def test_parameters_are_counted_once_and_ties_are_named(profiles):
    meta = profiles["transformer"].meta
    attention = 2 * (64 * 64 + 64) + 2 * (64 * 32 + 32)
    assert meta.num_params == 100 * 64 + attention + 12
    assert meta.tied == [["tok.weight", "head.weight"]]
    assert (meta.param_dtype, meta.optimizer, meta.optimizer_state_bytes_per_param) == ("bf16", "adamw", 4.0)


def test_one_micro_batch_is_kept_and_the_others_are_counted(profiles):
    profile = profiles["transformer"]
    assert profile.meta.accumulation == 4
    assert len(rows(profile, operator="aten.embedding", phase="forward")) == 1
    assert profile.meta.clips_gradients
    assert (rows(profile, phase="optimizer")["op_class"] == "optimizer").all()


def test_flops_are_those_of_the_formulas(profiles):
    forward = rows(profiles["transformer"], phase="forward")
    tokens, width = 2 * 16, 64
    matmul = 2 * tokens * (2 * width * width + 2 * width * 32 + width * 100)
    attention = 2 * 2 * 2 * 4 * 16 * 16 * 16  # two products, batch 2, heads 4, 16 x 16 positions, head size 16
    assert forward[forward["op_class"] == "matmul"]["flops"].sum() == matmul
    assert forward[forward["op_class"] == "attention"]["flops"].sum() == attention
    backward = rows(profiles["transformer"], phase="backward")
    assert backward[backward["op_class"] == "matmul"]["flops"].sum() == 2 * matmul


def test_attention_is_one_causal_row_with_its_heads(profiles):
    profile = profiles["transformer"]
    attention = rows(profile, phase="forward", op_class="attention")
    assert attention["causal"].tolist() == [1]
    assert attention["module"].tolist() == ["attention"]
    assert (profile.meta.num_heads, profile.meta.num_kv_heads) == (4, 2)


def test_token_inputs_give_batch_sequence_and_vocabulary(profiles):
    meta = profiles["transformer"].meta
    assert (meta.batch_size, meta.seq_len, meta.vocab_size, meta.logits_shape) == (2, 16, 100, [32, 100])


def test_backward_carries_module_and_class_of_its_forward(profiles):
    backward = rows(profiles["transformer"], phase="backward")
    table = backward[backward["operator"] == "aten.embedding_dense_backward"]
    assert (table["module"].tolist(), table["op_class"].tolist()) == (["tok"], ["embedding"])
    products = backward[backward["flops"] > 0]
    assert set(products["module"]) == {"head", "attention", *(f"attention.{p}_proj" for p in "qkvo")}


def test_projections_of_the_same_input_share_a_group(profiles):
    modules = profiles["transformer"].modules.set_index("module")
    groups = [modules.loc[f"attention.{name}_proj", "input_group"] for name in "qkvo"]
    assert len(set(groups[:3])) == 1
    assert groups[3] not in groups[:3]
    assert modules.loc["attention.k_proj", "weight_shape"] == [32, 64]
    assert modules.loc["tok", "weight_layout"] == "embedding"


def test_parameters_without_gradient_are_named(profiles):
    profile = profiles["transformer"]
    assert "unused.weight" in hazards(profile)["unused-parameters"]
    assert set(profile.parameters[~profile.parameters["got_grad"]]["name"]) == {"unused.weight", "unused.bias"}


def test_checkpointing_keeps_block_inputs_and_tells_what_blocks_would_keep(profiles, capture_all):
    checkpointed = profiles["checkpointed"]
    plain, _ = capture_all({"plain": SCRIPTS["checkpointed"]}, plain={"args": ["--plain"]})
    inputs = 3 * 16 * 64 * 4
    assert checkpointed.meta.uses_checkpointing
    assert not plain["plain"].meta.uses_checkpointing
    assert checkpointed.meta.saved_bytes < plain["plain"].meta.saved_bytes
    without = checkpointed.meta.saved_bytes + rows(checkpointed, phase="recompute")["saved_bytes"].sum()
    assert abs(without - plain["plain"].meta.saved_bytes) <= inputs
    assert rows(checkpointed, phase="recompute")["flops"].sum() == pytest.approx(
        rows(checkpointed, phase="forward")["flops"].sum(), rel=0.35
    )
    assert checkpointed.meta.num_params == plain["plain"].meta.num_params


def test_copies_tell_their_devices_and_come_back_in_backward(profiles):
    profile = profiles["two_devices"]
    copies = profile.operators[profile.operators["copy_from"] != ""]
    kinds = copies.groupby("op_class").size().to_dict()
    assert kinds["copy-host-to-device"] == 2
    there = copies[(copies["phase"] == "forward") & (copies["op_class"] == "copy-device-to-device")]
    back = copies[(copies["phase"] == "backward") & (copies["op_class"] == "copy-device-to-device")]
    assert there[["copy_from", "copy_to"]].to_numpy().tolist() == [["cuda:0", "cuda:1"]]
    assert back[["copy_from", "copy_to"]].to_numpy().tolist() == [["cuda:1", "cuda:0"]]
    assert there["written_bytes"].tolist() == [4 * 64 * 4]
    assert kinds["copy-device-to-host"] == 1
    assert set(rows(profile, module="b", phase="forward")["device"]) == {"cuda:1"}
    assert "cuda:0, cuda:1" in hazards(profile)["two-device-split"]


def test_an_everyday_script_comes_through_and_touches_no_file(captured):
    profiles, folder = captured
    meta = profiles["everyday"].meta
    assert (meta.batch_size, meta.optimizer, meta.model_class) == (8, "adamw", "Net")
    assert meta.input_shapes == [[8, 32]]
    assert "2 workers" in hazards(profiles["everyday"])["data-loader-workers"]
    assert meta.other_models == {"Net": meta.num_params}
    assert "ema-copy" in hazards(profiles["everyday"])
    assert {p.name for p in folder.iterdir()} == {f"{name}.py" for name in SCRIPTS}


def test_several_optimizers_make_one_step_of_two_models(profiles):
    profile = profiles["gan"]
    assert (profile.meta.num_optimizers, profile.meta.accumulation) == (2, 1)
    assert profile.meta.num_params == 2442 + 10 * 16 + 16 + 16 + 1
    assert {m.split(".")[0] for m in profile.parameters["module"]} == {"Net", "Sequential"}
    assert "several-optimizers" in hazards(profile)
    assert hazards(profile)["custom-autograd-function"].startswith("Round")


def test_updates_by_hand_and_carried_state_are_seen_even_behind_a_bare_except(profiles):
    profile = profiles["by_hand"]
    assert profile.meta.optimizer == "hand-written"
    assert {"hand-written-optimizer", "recurrent-state-carried"} <= set(hazards(profile))
    recurrent = rows(profile, op_class="recurrent")
    assert recurrent["phase"].tolist() == ["forward", "backward"]
    assert recurrent["flops"].iloc[0] == 2 * 7 * 4 * 2 * (4 * 32 * 32 * 2)
    assert recurrent["flops"].iloc[1] == 2 * recurrent["flops"].iloc[0]


def test_a_script_for_torchrun_runs_as_one_process(profiles):
    profile = profiles["launched"]
    meta = profile.meta
    assert (meta.model_class, meta.num_params, meta.optimizer_fused) == ("Net", 2442, True)
    assert (meta.autocast_dtype, meta.uses_grad_scaler, meta.param_dtype) == ("fp16", True, "fp32")
    assert {"already-distributed", "process-group-at-import"} <= set(hazards(profile))
    assert set(profile.parameters["name"]) == {f"{m}.{k}" for m in ("layers.0", "layers.1", "out") for k in ("weight", "bias")}


def test_experts_get_their_even_share_of_tokens(profiles):
    profile = profiles["experts"]
    work = rows(profile, phase="forward", op_class="matmul")
    work = work[work["module"].str.startswith("experts.")]
    assert len(work) == 4
    assert work["flops"].sum() == 2 * 4096 * 2 * 512 * 512
    assert work["flops"].max() < 1.2 * work["flops"].mean()
    assert "data-dependent-shapes" in hazards(profile)
    assert "host-sync" in hazards(profile)


def test_a_mask_of_unknown_values_is_run_on_real_tensors_and_said(profiles):
    profile = profiles["masked"]
    assert "real tensors" in profile.meta.warnings[0]
    first = rows(profile, module="layers.0", phase="forward", op_class="matmul")
    assert 64 < first["output_shapes"].iloc[0][0][0] < 192
    assert profile.meta.num_params == 2 * (128 * 128 + 128) + 1290


def test_spawned_processes_become_one_and_uneven_micro_batches_are_said(profiles):
    meta = profiles["spawned"].meta
    assert (meta.model_class, meta.accumulation, meta.input_shapes) == ("Net", 3, [[8, 16]])
    assert "already-distributed" in hazards(profiles["spawned"])
    assert "differ in size" in meta.warnings[0]
    assert "[[16, 16]]" in meta.warnings[0]


def test_evaluations_of_a_closure_are_no_micro_batches(profiles):
    meta = profiles["closure"].meta
    assert (meta.optimizer, meta.accumulation) == ("lbfgs", 1)
    assert "closure several times" in meta.warnings[0]


def test_function_transforms_are_traced_with_an_estimate_of_what_is_kept(profiles):
    profile = profiles["transforms"]
    assert (profile.meta.optimizer, profile.meta.num_params) == ("hand-written", 2442)
    assert profile.parameters["got_grad"].all()
    assert profile.meta.saved_bytes >= 2 * 8 * 32 * 4 + 8 * 10 * 4
    assert "torch.func" in profile.meta.warnings[0]
    forward = rows(profile, phase="forward", op_class="matmul")["flops"].sum()
    assert forward == 2 * 8 * (2 * 32 * 32 + 32 * 10)
    assert not profile.meta.uses_checkpointing
    backward = rows(profile, phase="backward", op_class="matmul")
    assert backward["flops"].sum() >= forward
    assert set(backward["module"]) == {"layers.0", "layers.1", "out"}
