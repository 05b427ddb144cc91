"""A world in which CUDA devices exist and tensors only remember where they are meant to be.

Every tensor lives on the CPU (as a fake tensor, or as a small real one), because fake "cuda" tensors abort a CPU build of torch at
the first backward. `World` holds what the patches in `devices.py` and `values.py` and the recorder share: the intended device of a
tensor, and the value of a tensor too small to be worth forgetting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

CPU = torch.device("cpu")
NUM_DEVICES = 8
#: Tensors of at most this many elements keep their values in the fake world: indices, masks, sizes, schedules.
MAX_INTEGER_VALUES = 1 << 22
MAX_FLOAT_VALUES = 1 << 12
_DEVICE = "_advisor_device"
_VALUE = "_advisor_value"


class World:
    """Devices and values of tensors in the child process.

    Args:
        fake: tensors have no storage (FakeTensorMode is on); False runs the script on real CPU tensors.
        num_devices: CUDA devices that the script is told of.
    """

    def __init__(self, *, fake: bool, num_devices: int = NUM_DEVICES) -> None:
        self.fake, self.num_devices = fake, num_devices
        self.current_device = 0
        self.factory_device = CPU  # intended device of tensors made from nothing
        self.num_inside = 0  # > 0 while an operator runs below the recorder: devices are then the real ones
        self.is_copying = False  # an operator runs that stands in for a copy between devices
        self.on_copy: Callable[[torch.Tensor, torch.Tensor, torch.device, torch.device], None] | None = None
        self.autocast_operators: object = None  # kept, or they would be torch's own again
        self.host_model_bytes = 0  # largest model that was on the host before it was moved or cast

    def device(self, device: Any) -> torch.device | None:
        """What a script meant by a device argument; None for none."""
        if device is None:
            return None
        if isinstance(device, int):
            return torch.device("cuda", device)
        found = torch.device(device) if isinstance(device, str) else device
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", self.current_device)
        return found if isinstance(found, torch.device) else None

    def real_device(self, device: Any) -> Any:
        """The device to hand to torch for one that a script asked for."""
        found = self.device(device)
        return CPU if found is not None and found.type == "cuda" else device

    @staticmethod
    def device_of(tensor: torch.Tensor) -> torch.device:
        """Intended device of a tensor; the CPU where nobody said otherwise."""
        found = tensor.__dict__.get(_DEVICE)
        return found if found is not None else CPU

    @staticmethod
    def set_device(tensor: torch.Tensor, device: torch.device) -> None:
        """Say where a tensor is meant to be."""
        if device.type == "cuda":
            tensor.__dict__[_DEVICE] = device
        else:
            tensor.__dict__.pop(_DEVICE, None)

    @staticmethod
    def has_label(tensor: torch.Tensor) -> bool:
        return _DEVICE in tensor.__dict__

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Real tensor with the values of a fake one, None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        found = tensor.__dict__.get(_VALUE)
        return found if found is not None else tensor.constant

    @staticmethod
    def set_value(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Remember (or forget) the values of a fake tensor."""
        if value is None:
            tensor.__dict__.pop(_VALUE, None)
        else:
            tensor.__dict__[_VALUE] = value

    def is_small(self, tensor: torch.Tensor) -> bool:
        """Whether values of a tensor of this size and dtype are kept."""
        limit = MAX_FLOAT_VALUES if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_INTEGER_VALUES
        return tensor.numel() <= limit

    def real_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values to hand to plain Python or NumPy: the known ones, else zeros of the same shape."""
        known = self.value_of(tensor)
        with unset_fake_temporarily():
            if known is not None:
                return known.detach()
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)

    def scalar(self, tensor: torch.Tensor) -> float | int | bool | complex:
        """Value of a one-element tensor; a harmless stand-in where it has none (1 of an integer, 0.5 of a float, True)."""
        known = self.value_of(tensor)
        if known is not None:
            with unset_fake_temporarily():
                result: float | int | bool | complex = _plain_item(known)
            return result
        if tensor.dtype == torch.bool:
            return True
        return 0.5 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1


def _plain_item(tensor: torch.Tensor) -> Any:
    return torch.ops.aten._local_scalar_dense(tensor.detach())
