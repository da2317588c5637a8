"""What watches fn where vmap or plain autograd runs its ops as they are, and the backward passes of loops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg import _functorch, _kernels, _pass
from psg._call import Call
from psg._errors import PsgError, StateError
from psg._marks import Marks
from psg._ops import LIKENESSES, leaves_of, target_of
from psg.rules._registry import find_decomposition, find_leak
from psg.rules.leaks import OWN_GENERATOR, refuse_updates


class VmapGuard(TorchFunctionMode):
    """Under vmap(grad): refuses the ops that vmap gets wrong, and updates of running statistics; writes out what it gets right otherwise.

    Args:
        call: The call.
        samples: What fn is given.
        differentiated: Whether the gradients are differentiated in turn.

    Attributes:
        failure: The last error of an op, which fn may have handled: its message alone, for it holds all frames, and so what they hold.
    """

    def __init__(self, call: Call, samples: Sequence[Tensor], differentiated: bool) -> None:
        super().__init__()
        self.outside = call.outside
        self.differentiated = differentiated
        self.traced = _functorch.is_traced()
        self.failure: str | None = None
        grad = _functorch.current_level()
        self.own = Marks(grad - 1, grad)
        self.own.claim(samples)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            leaves = leaves_of(args, kwargs)
            marked = self.own.owns(leaves) and func not in LIKENESSES
            self.outside.look(func, leaves)
            output = self._run(func, *self.outside.replace((args, kwargs)))
            if marked:
                self.own.claim(output, target_of(func, args, kwargs))
            return output
        except Exception as error:
            self.failure = str(error)
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        refuse_updates(func, args, kwargs)
        # Where the gradients are differentiated, autograd is beneath vmap here too.
        reason = find_leak(func, args, kwargs, "vmap", *(("capture",) if self.differentiated else ()))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves_of(args, kwargs)):
            reason = OWN_GENERATOR
        if _functorch.is_traced() and not self.traced:
            reason = "a tracer inside fn, such as torch.func.linearize's, takes what it meets under vmap as constant"
        if reason is not None:
            raise PsgError(reason)
        decompose = find_decomposition(func, self.differentiated)
        if decompose is not None:
            with self:
                output = decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        return func(*args, **kwargs)


class LoopGuard(TorchFunctionMode):
    """Under plain autograd: refuses updates of running statistics, and notes what fn uses.

    Args:
        call: The call.
        own: What fn is given.

    Attributes:
        met: What has met an op, by id.
        recorded: What has met one that autograd records.
    """

    def __init__(self, call: Call, own: Sequence[Any] = ()) -> None:
        super().__init__()
        self.outside = call.outside
        self.own = frozenset(map(id, own))
        self.met: set[int] = set()
        self.recorded: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = leaves_of(args, kwargs)
        ids = set(map(id, leaves))
        self.met |= ids
        if torch.is_grad_enabled():
            self.recorded |= ids
        self.outside.look(func, leaves, self.own)
        args, kwargs = self.outside.replace((args, kwargs))
        refuse_updates(func, args, kwargs)
        return _kernels.run(func, args, kwargs)


class Again(TorchFunctionMode):
    """Watches what a backward pass runs again, as a checkpointed layer's does: it must meet the parameters that the forward pass met."""

    def __init__(self, call: Call, met: set[int], called: _pass.Pass) -> None:
        super().__init__()
        self.call, self.met, self.called = call, met, called
        self.shapes = {call.leaves[position].shape for position in call.params}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in leaves_of(args, kwargs):
            if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad and id(leaf) not in self.met and leaf.shape in self.shapes:
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of fn again, as checkpointed, reversible and adjoint layers do, with "
                    f"a module's own parameter (of shape {tuple(leaf.shape)}) in the place of the one that fn was given: functional_call "
                    "has ended by then. Make fn with psg.stateless, which holds the parameters in place until the end."
                )
            if id(leaf) in self.called.ambiguous:
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of a module again, as a checkpointed layer's does, and fn has called "
                    "that module with several sets of parameters: which of them is not known by then. Take the checkpointing out."
                )
        return func(*args, **kwargs)
