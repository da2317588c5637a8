"""The state of the random number generators that a call may draw from."""

import random
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from psg._errors import PsgError
from psg._torch import _functorch

State = dict[torch.device, Tensor]

_CPU = torch.device("cpu")


def get_state(tensors: Iterable[Tensor]) -> State:
    """The generator states of the CPU and of the devices of these tensors."""
    found = {_CPU: _state_of(_CPU)}
    for tensor in tensors:
        device = tensor.device
        if not tensor.is_cpu and not tensor.is_meta and device not in found and hasattr(_of(device), "get_rng_state"):
            found[device] = _state_of(device)
    return found


def now(state: State) -> State:
    """The states in which the same generators are now."""
    return {device: _state_of(device) for device in state}


def set_state(state: State | None) -> None:
    """Put the generators back into a state; None leaves them as they are."""
    for device, value in (state or {}).items():
        if device == _CPU:
            torch.set_rng_state(value)
        else:
            _of(device).set_rng_state(value, *_which(device))


def rewind(state: State | None) -> None:
    """Put the generators back into a state, so that the next part of a call draws what the one before has drawn.

    Raises:
        PsgError: A trace records the call: a graph draws anew.
    """
    if state is not None and _functorch.is_recorded() and not same_state(state, now(state)):
        raise PsgError('randomness="same" for a call that is run in parts draws their numbers more than once')
    set_state(state)


class Start:
    """Where passes begin that may be given up, each for the next: the next draws the same random numbers, and a trace has but its own ops.

    Args:
        tensors: The passes draw on their devices, and on the CPU.

    Attributes:
        state: The states of the generators.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.state = get_state(tensors)
        self._forget = _functorch.attempt()

    def go_back(self) -> None:
        """Give up what has run since."""
        self._forget()
        set_state(self.state)


def same_state(state: State, other: State) -> bool:
    """Whether no random number was drawn between the two states."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():  # a tracer would refuse to tell
        return all(torch.equal(value, other[device]) for device, value in state.items())


def get_python_state() -> tuple[Any, Any]:
    """The states of the generators of Python and, if it is imported, of NumPy. Asking takes too long to do so in every call."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_python_state(state: tuple[Any, Any]) -> None:
    """Put these generators back into a state."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def same_python_state(state: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether no random number was drawn from them between the two states."""
    return state[0] == other[0] and (state[1] is None or all(map(_equal, state[1], other[1])))


class Snapshot(NamedTuple):
    """The states of torch's generators, and of those of Python and NumPy.

    Attributes:
        torchs: The former.
        pythons: The latter; None if they are left alone.
    """

    torchs: State
    pythons: tuple[Any, Any] | None

    @classmethod
    def take(cls, tensors: Iterable[Tensor], pythons: bool = True) -> "Snapshot":
        """The states now, with those of the devices of these tensors; of Python and NumPy only with `pythons`."""
        return cls(get_state(tensors), get_python_state() if pythons else None)

    def now(self) -> "Snapshot":
        """The states in which the same generators are now."""
        return Snapshot(now(self.torchs), None if self.pythons is None else get_python_state())

    def restore(self) -> None:
        """Put the generators back into these states."""
        set_state(self.torchs)
        if self.pythons is not None:
            set_python_state(self.pythons)

    def equals(self, other: "Snapshot") -> bool:
        """Whether no random number was drawn between the two, from the generators that both look at."""
        return same_state(self.torchs, other.torchs) and self._same_pythons(other)

    def without_idle(self, later: "Snapshot") -> "Snapshot":
        """The same, but leaving Python's and NumPy's alone if nothing was drawn from them until later: asking them takes long."""
        return self._replace(pythons=None) if self._same_pythons(later) else self

    def _same_pythons(self, other: "Snapshot") -> bool:
        return self.pythons is None or other.pythons is None or same_python_state(self.pythons, other.pythons)


def _equal(value: Any, other: Any) -> bool:
    return value.tobytes() == other.tobytes() if hasattr(value, "tobytes") else value == other


def _state_of(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device == _CPU else _of(device).get_rng_state(*_which(device))


def _of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one such device
