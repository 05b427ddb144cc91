"""What a script does to files and processes stays in its own world, and looks to the script as if it had happened."""

import time

import pytest

from advisor.profiling import capture

TRAIN = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FILES = (
    """
import glob, io, json, os, pathlib, shutil, sqlite3, tempfile
import numpy as np
import torch
from torch import nn
from safetensors.torch import load_file, save_file

def raises(kind, function, *args):
    try:
        function(*args)
    except kind:
        return True

def text(path):
    with open(path) as file:
        return file.read()

# a file of the user's: appended to, changed in place, renamed, removed, linked to
with open("append.txt", "a") as file:
    file.write("+")
with open("update.txt", "r+") as file:
    file.write("M")
assert (text("append.txt"), text("update.txt")) == ("mine+", "Mine")
os.rename("rename.txt", "renamed.txt")
assert text("renamed.txt") == "mine" and not os.path.exists("rename.txt") and "rename.txt" not in os.listdir()
os.remove("remove.txt")
assert not os.path.isfile("remove.txt") and raises(FileNotFoundError, open, "remove.txt")
os.symlink(os.path.abspath("low.txt"), "latest.txt")
pathlib.Path("latest.txt").write_text("other")
assert text("low.txt") == "mine"
handle = os.open("low.txt", os.O_WRONLY | os.O_TRUNC)
os.write(handle, b"low")
os.close(handle)
assert text("low.txt") == "low"
os.chmod("append.txt", 0)
shutil.rmtree("folder")
assert not os.path.isdir("folder")
os.mkdir("folder")
assert os.listdir("folder") == []
assert raises(FileExistsError, open, "append.txt", "x") and raises(FileNotFoundError, open, "nowhere", "r+")
assert raises(PermissionError, io.FileIO, "append.txt", "w") and io.FileIO("append.txt").read() == b"mine"

# files of the script's own, looked for in every way
os.makedirs("out/a/b", exist_ok=True)
os.makedirs("out/a/b", exist_ok=True)
assert raises(FileExistsError, os.mkdir, "out")
path = pathlib.Path("out/a/b/f.json")
path.write_text(json.dumps({"a": 1}))
assert path.exists() and path.is_file() and path.stat().st_size == 8 and os.access(path, os.R_OK)
assert os.listdir("out/a") == ["b"] and [p.name for p in path.parent.iterdir()] == ["f.json"]
assert [e.name for e in os.scandir("out/a/b")] == ["f.json"] and glob.glob("out/*/*/*.json") and list(pathlib.Path("out").rglob("*.json"))
assert sum(len(files) for _, _, files in os.walk("out")) == 1 and {"out", "append.txt"} <= set(os.listdir("."))
os.replace("out/a/b/f.json", "out/g.json")
assert not path.exists() and json.loads(text("out/g.json")) == {"a": 1}
shutil.copytree("out", "copied")
shutil.move("copied/g.json", "moved.json")
assert text("moved.json") == text("out/g.json") and not os.path.exists("copied/g.json")
os.chdir("out")
assert "g.json" in os.listdir()
os.chdir("..")

# libraries
np.save("a.npy", np.arange(3))
assert np.load("a.npy").sum() == 3
for _ in range(2):
    database = sqlite3.connect("x.db")
    database.execute("create table if not exists a(b)")
    database.execute("insert into a values(3)")
    database.commit()
assert database.execute("select count(*) from a").fetchone() == (2,)
net = nn.Linear(3, 2)
torch.save({"model": net.state_dict(), "epoch": 4}, "new/ck.tmp")
os.replace("new/ck.tmp", "ck.pt")
loaded = torch.load("ck.pt", map_location="cpu", weights_only=True)
net.load_state_dict(loaded.pop("model"))
assert loaded == {"epoch": 4} and "model" in torch.load("ck.pt")
buffer = io.BytesIO()
torch.save([1, 2], buffer)
buffer.seek(0)
assert torch.load(buffer) == [1, 2]
with tempfile.TemporaryDirectory() as name:
    save_file(net.state_dict(), name + "/w.safetensors")
    assert load_file(name + "/w.safetensors")["weight"].shape == (2, 3)
torch.jit.script(nn.Linear(2, 2)).save("script.pt")
"""
    + TRAIN
)
#: Turns warnings into errors, has modules of our names beside it, and leaves processes in sessions of their own.
PROCESSES = (
    """
import warnings
warnings.simplefilter("error")
import os, subprocess, time
import advisor, cost_models.inner
assert (advisor.OWN, cost_models.inner.OWN) == (1, 2)
subprocess.Popen(["sleep", "8123.5"], start_new_session=True, env={"PATH": os.environ["PATH"]})
subprocess.Popen("(setsid sleep 8123.5 &); exit 0", shell=True)
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "8123.5"])
import torch
from torch import nn
"""
    + TRAIN
)
USERS = ("append", "update", "rename", "remove", "low")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("own")
    for name in USERS:
        (found / f"{name}.txt").write_text("mine", encoding="utf8")
    for name in ("folder", "cost_models"):
        (found / name).mkdir()
    (found / "folder" / "inner.txt").write_text("mine", encoding="utf8")
    (found / "advisor.py").write_text("OWN = 1\n", encoding="utf8")
    (found / "cost_models" / "__init__.py").touch()
    (found / "cost_models" / "inner.py").write_text("OWN = 2\n", encoding="utf8")
    (found / "files.py").write_text(FILES, encoding="utf8")
    (found / "processes.py").write_text(PROCESSES, encoding="utf8")
    return found


def contents(folder):
    return {str(p.relative_to(folder)): (p.read_bytes() if p.is_file() else b"", p.stat().st_mode) for p in folder.rglob("*")}


def test_writes_are_read_back_and_no_file_of_the_user_changes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = contents(folder)
    profile = capture("files.py", capture="traced", timeout_s=60.0)
    assert (profile.meta.model_class, profile.meta.warnings) == ("Linear", [])
    assert contents(folder) == before


def test_processes_are_named_and_none_of_them_survives(folder, command_lines):
    profile = capture(str(folder / "processes.py"), capture="traced", timeout_s=60.0)
    assert profile.meta.num_params == 20
    assert profile.meta.warnings[0].startswith("The script starts other processes (processes.py:7, processes.py:8, processes.py:9)")
    for _ in range(20):  # a killed process may be listed for a moment
        running = command_lines()
        if not any(b"8123.5" in line for line in running):
            break
        time.sleep(0.1)
    assert running, "this test reads /proc"
    assert not any(b"8123.5" in line for line in running)
