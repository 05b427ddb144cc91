"""Launch files are what shells, Slurm, Kubernetes and SkyPilot take, and start the plan's processes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from engine_plans import CASES, REPOSITORY

from advisor.engines import EngineInput, plan_files
from advisor.engines.launch import job_name, skypilot_name
from cost_models import catalogue

FOLDER = Path("advice/plan-1")
ONE_NODE, TWO_NODES = "ddp", "zero3-two-nodes"
KUBERNETES = "1.31"
STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
#: Keys of a SkyPilot task that are written here, with what they take.
SKYPILOT = {
    "type": "object", "additionalProperties": False, "required": ["name", "num_nodes", "resources", "run"],
    "properties": {
        "name": STRING, "num_nodes": COUNT, "workdir": STRING, "setup": STRING, "run": STRING,
        "resources": {"type": "object", "additionalProperties": False,
                      "properties": {"accelerators": {"type": "string", "pattern": r"^[\w-]+:\d+$"}, "network_tier": {"enum": ["standard", "best"]}}},
    },
}  # fmt: skip
ROLE = {
    "type": "object", "additionalProperties": False, "required": ["replicas", "restartPolicy", "template"],
    "properties": {"replicas": COUNT, "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, "template": {"type": "object"}},
}  # fmt: skip
#: kubeflow.org/v1 PyTorchJob; the pods' templates are checked as Kubernetes' own.
PYTORCHJOB = {
    "type": "object", "additionalProperties": False, "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"}, "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": STRING}},
        "spec": {
            "type": "object", "additionalProperties": False, "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": STRING,
                "runPolicy": {"type": "object", "additionalProperties": False,
                              "properties": {"cleanPodPolicy": {"enum": ["None", "Running", "All"]}, "backoffLimit": {"type": "integer"}}},
                "pytorchReplicaSpecs": {"type": "object", "additionalProperties": False, "required": ["Master"],
                                        "properties": {"Master": ROLE, "Worker": ROLE}},
            },
        },
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def on(gpu: str, case: str = TWO_NODES) -> EngineInput:
    return dataclasses.replace(CASES[case], gpu=gpu)


def documents(inp: EngineInput, name: str) -> list[dict]:
    return list(yaml.safe_load_all(plan_files(inp, FOLDER)[f"launch/{name}"]))


@pytest.mark.parametrize("case", CASES)
def test_shell_is_clean(case: str, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert shellcheck
    texts = {name: text for name, text in plan_files(CASES[case], FOLDER).items() if name.endswith((".sh", ".sbatch"))}
    assert {"launch.sh", "launch/slurm.sbatch"} <= texts.keys()
    for i, text in enumerate(texts.values()):
        script = tmp_path / f"{i}.sh"
        script.write_text(text)
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", [ONE_NODE, TWO_NODES])
def test_kubernetes_takes_the_job(case: str) -> None:
    for document in documents(CASES[case], "job.yaml"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", [ONE_NODE, TWO_NODES])
def test_the_training_operator_takes_the_job(case: str) -> None:
    (job,) = documents(CASES[case], "pytorchjob.yaml")
    jsonschema.validate(job, PYTORCHJOB)
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert sum(role["replicas"] for role in roles.values()) == CASES[case].num_nodes
    for role in roles.values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": role["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", [ONE_NODE, TWO_NODES])
def test_skypilot_takes_the_task(case: str) -> None:
    (task,) = documents(on("h100-sxm-80gb", case), "skypilot.yaml")
    jsonschema.validate(task, SKYPILOT)
    assert task["num_nodes"] == CASES[case].num_nodes
    assert task["resources"]["accelerators"] == "H100:8"


@pytest.mark.parametrize("name", ["launch.sh", "launch/slurm.sbatch", "launch/pytorchjob.yaml", "launch/skypilot.yaml"])
def test_every_launcher_starts_a_process_for_each_gpu(name: str) -> None:
    text = plan_files(on("h100-sxm-80gb"), FOLDER)[name]
    if name.endswith("sbatch"):
        assert "#SBATCH --nodes=2\n" in text
        assert "#SBATCH --gpus-per-node=8\n" in text
        assert "advice/plan-1/launch.sh" in text
    else:
        assert re.search(r"torchrun --nnodes 2 --nproc-per-node 8 ", text)


def test_pods_ask_for_the_makers_devices() -> None:
    def limits(gpu: str) -> dict:
        return documents(on(gpu), "job.yaml")[1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]

    assert limits("mi300x") == {"amd.com/gpu": 8}
    assert limits("h100-sxm-80gb") == {"nvidia.com/gpu": 8}


def test_gpus_that_no_cloud_lends_get_no_skypilot_task() -> None:
    assert "launch/skypilot.yaml" not in plan_files(on("rtx-3090"), FOLDER)


def test_skypilot_names_tell_similar_gpus_apart() -> None:
    names = {gpu: skypilot_name(gpu) for gpu in catalogue.gpu_names()}
    assert (names["a10"], names["a10g"], names["l4"], names["l40"], names["l40s"]) == ("A10", "A10G", "L4", "L40", "L40S")
    assert (names["a100-sxm-40gb"], names["a100-sxm-80gb"]) == ("A100", "A100-80GB")
    assert (names["v100-sxm-16gb"], names["v100-sxm-32gb"], names["titan-rtx"]) == ("V100", "V100-32GB", "")


@pytest.mark.parametrize("script", ["train.py", "My Model_v2.py", "../x/ä.py", "a" * 80 + ".py"])
def test_job_names_are_ones_that_kubernetes_takes(script: str) -> None:
    name = job_name(dataclasses.replace(CASES[ONE_NODE], script=script))
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name)


def test_paths_with_spaces_stay_whole() -> None:
    inp = dataclasses.replace(on("h100-sxm-80gb"), folder="my advice/plan-1")
    assert documents(inp, "job.yaml")[1]["spec"]["template"]["spec"]["containers"][0]["command"] == ["bash", "my advice/plan-1/launch.sh"]
    assert "'my advice/plan-1/train.py'" in plan_files(inp, FOLDER)["launch/skypilot.yaml"]
