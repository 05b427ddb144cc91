"""From a profiler's events to seconds per operator call. No torch: the events are plain values.

Seconds are those of the device: of the kernels that a call launched where there is a GPU, else of the CPU itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

MODULE_RANGE = "advisor:module:"
UPDATE_RANGE = "advisor:update"
_EVALUATE = "autograd::engine::evaluate_function"
_OPTIMIZER = ("Optimizer.step#", UPDATE_RANGE, "Optimizer.zero_grad#")
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a profile, times in microseconds as the profiler gives them."""

    id: int
    name: str
    thread: int
    start_us: float
    end_us: float
    sequence: int  # autograd's number of the forward call, -1 for none
    is_device: bool  # a kernel or copy on the device, not a call on the host
    device_us: float = 0.0  # of the kernels launched by this very call (not by calls inside it)
    num_kernels: int = 0

    def as_list(self) -> list[object]:
        return list(astuple(self))

    @classmethod
    def from_list(cls, values: Sequence[object]) -> Event:
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """Seconds of one operator call, or of what lies between calls that the trace knows."""

    module: str
    phase: str  # "" where it is not known
    operator: str  # "" for seconds that belong to no operator of the trace
    seconds: float
    num_kernels: int = 0


class _Node:
    __slots__ = ("children", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.children: list[_Node] = []


def busy_s(events: Iterable[Event]) -> float:
    """Seconds in which the device worked: the union of its kernels' times, or of the operators' times on the CPU."""
    events = list(events)
    on_device = [e for e in events if e.is_device]
    used = on_device or [e for e in events if "::" in e.name and not e.name.startswith(_EVALUATE)]
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.start_us, e.end_us) for e in used):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total * 1e-6


def calls_of(events: Sequence[Event], paths: Mapping[str, str], operators: Collection[str], *, on_device: bool) -> list[MeasuredCall]:
    """Seconds per operator call, in the order of the step.

    Args:
        events: those of one step.
        paths: module paths by the number in its range's name.
        operators: operators that the trace knows; a call to one takes the time of all calls inside it.
        on_device: seconds are those of kernels, not of the host.
    """
    walk = _Walk(paths, {name.replace(".", "::", 1): name for name in operators}, on_device)
    forest = _forest([e for e in events if not e.is_device])
    for node in forest:
        walk.note_modules(node, "")
    for node in forest:
        walk.visit(node, "", "")
    return walk.calls


def _forest(events: Sequence[Event]) -> list[_Node]:
    """Calls nested by time, per thread."""
    roots: list[_Node] = []
    stacks: dict[int, list[_Node]] = {}
    for event in sorted(events, key=lambda e: (e.start_us, -e.end_us, e.id)):
        stack = stacks.setdefault(event.thread, [])
        while stack and event.start_us >= stack[-1].event.end_us:
            stack.pop()
        node = _Node(event)
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


class _Walk:
    def __init__(self, paths: Mapping[str, str], operators: dict[str, str], on_device: bool) -> None:
        self.paths, self.operators, self.on_device = paths, operators, on_device
        self.module_of_sequence: dict[int, str] = {}
        self.calls: list[MeasuredCall] = []
        attention = [name for name in operators.values() if _ATTENTION in name]
        self.attention = {
            False: next((a for a in attention if "backward" not in a), ""),
            True: next((a for a in attention if "backward" in a), ""),
        }

    def note_modules(self, node: _Node, module: str) -> None:
        """Which module made the autograd node of each number."""
        event = node.event
        if event.name.startswith(MODULE_RANGE):
            module = self.paths.get(event.name[len(MODULE_RANGE) :], module)
        if event.sequence >= 0 and "::" in event.name and not event.name.startswith(_EVALUATE):
            self.module_of_sequence.setdefault(event.sequence, module)
        for child in node.children:
            self.note_modules(child, module)

    def visit(self, node: _Node, module: str, phase: str) -> None:
        """Charge this call's seconds, or those of the calls inside it."""
        event = node.event
        if event.name.startswith(MODULE_RANGE):
            module = self.paths.get(event.name[len(MODULE_RANGE) :], module)
            phase = "recompute" if phase in ("backward", "recompute") else "forward"
        elif event.name.startswith(_EVALUATE):
            phase = "backward"
            module = self.module_of_sequence.get(event.sequence, module)
        elif event.name.startswith(_OPTIMIZER):
            phase, module = "optimizer", ""
        operator = self._operator(event.name, phase)
        if operator:
            self._charge(module, phase, operator, self._total_us(node), self._kernels(node))
            return
        self._charge(module, phase, "", self._own_us(node), event.num_kernels)
        for child in node.children:
            self.visit(child, module, phase)

    def _operator(self, name: str, phase: str) -> str:
        found = self.operators.get(name, "")
        if not found and _ATTENTION in name:  # a GPU takes another fused kernel than the trace
            found = self.attention["backward" in name or phase == "backward"]
        return found

    def _charge(self, module: str, phase: str, operator: str, microseconds: float, num_kernels: int) -> None:
        if microseconds > 0 or operator:
            self.calls.append(
                MeasuredCall(module=module, phase=phase, operator=operator, seconds=microseconds * 1e-6, num_kernels=num_kernels)
            )

    def _own_us(self, node: _Node) -> float:
        if self.on_device:
            return node.event.device_us
        if "::" not in node.event.name or node.event.name.startswith(_EVALUATE):
            return 0.0  # Python between operators
        return max(0.0, node.event.end_us - node.event.start_us - sum(c.event.end_us - c.event.start_us for c in node.children))

    def _total_us(self, node: _Node) -> float:
        return self._own_us(node) + sum(self._total_us(c) for c in node.children)

    def _kernels(self, node: _Node) -> int:
        return node.event.num_kernels + sum(self._kernels(c) for c in node.children)
