"""Reading this machine's GPUs through the driver library, played by a stand-in."""

import sys
import types

import pytest

from advisor.measure.local_gpus import local_gpus


class NVMLError(Exception):
    pass


def driver(names, *, nvlinks=0, version=3, generation=4, width=16):
    """A stand-in for pynvml with these devices."""
    fake = types.ModuleType("pynvml")

    def link_state(_, i):
        if i >= nvlinks:
            raise NVMLError
        return 1

    fake.NVMLError = NVMLError
    fake.nvmlInit = fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetCount = lambda: len(names)
    fake.nvmlDeviceGetHandleByIndex = lambda i: i
    fake.nvmlDeviceGetName = lambda h: names[h]
    fake.nvmlDeviceGetUUID = lambda h: f"GPU-{h}abc"
    fake.nvmlDeviceGetMemoryInfo = lambda h: types.SimpleNamespace(total=80 * 2**30)
    fake.nvmlDeviceGetNvLinkState = link_state
    fake.nvmlDeviceGetNvLinkVersion = lambda h, i: version
    fake.nvmlDeviceGetMaxPcieLinkGeneration = lambda h: generation
    fake.nvmlDeviceGetMaxPcieLinkWidth = lambda h: width
    return fake


@pytest.fixture
def use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda fake: monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_nvlinks_are_counted(use):
    use(driver(["NVIDIA A100-SXM4-80GB"] * 8, nvlinks=12))
    found = local_gpus()
    assert (found.count, found.intra.name, found.memory_bytes) == (8, "nvlink-3", 80 * 2**30)


def test_fewer_links_than_usual_give_less(use):
    use(driver(["NVIDIA A100-SXM4-80GB"] * 2, nvlinks=4))
    assert local_gpus().intra.bytes_per_s == 100e9


def test_without_nvlink_the_slot_counts(use):
    use(driver(["NVIDIA L4"] * 2, generation=4, width=8))
    found = local_gpus()
    assert found.intra.name == "pcie-4-x8" and found.intra.bytes_per_s == pytest.approx(15.75e9)


def test_only_visible_devices_count(use, monkeypatch):
    use(driver(["NVIDIA L4"] * 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert local_gpus().count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1abc")
    assert local_gpus().count == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_gpus() is None


def test_of_different_cards_the_most_numerous_count(use):
    use(driver(["NVIDIA L4", "Tesla T4", "NVIDIA L4"]))
    found = local_gpus()
    assert (found.device_name, found.count, found.other_names) == ("NVIDIA L4", 2, ("Tesla T4",))


def test_no_driver_means_no_gpu(use):
    fake = driver([])
    fake.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError())
    use(fake)
    assert local_gpus() is None
