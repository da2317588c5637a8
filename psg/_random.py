"""The state of the random number generators that a call may draw from."""

from collections.abc import Iterable

import torch
from torch import Tensor

State = dict[str, Tensor]


def get_state(tensors: Iterable[Tensor]) -> State:
    """The generator states of the CPU and of the devices of these tensors."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {"cpu": torch.get_rng_state(), **{str(device): torch.cuda.get_rng_state(device) for device in devices}}


def set_state(state: State | None) -> None:
    """Put the generators back into a state; None leaves them as they are."""
    for device, value in (state or {}).items():
        if device == "cpu":
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, device)


def same_state(state: State, other: State) -> bool:
    """Whether no random number was drawn between the two."""
    return all(torch.equal(value, other[device]) for device, value in state.items())
