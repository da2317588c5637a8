"""The pass for functions of a whole batch: `fn(params, *batch) -> losses [n]`, called once, without vmap.

For what vmap cannot run and a loop would run slowly: data-dependent routing, `.item()`, kernels without a batching rule. The gradient of
sample i is that of losses[i].

Nothing is lifted here. An op that meets a parameter runs by its rule, row by row of its data; an op on parameters alone is computed once
and pulled back; any other op that meets a parameter is an error, for nobody could say which sample its gradient belongs to.

Which sample a row belongs to is measured, not guessed. The cotangent of a row is linear in the weights of the losses: a second backward
pass, for sum_i w_i losses[i] with distinct w_i, gives w_i times the first one's on every row that only loss i depends on. So the ratio
tells the sample, however fn has reshaped, sorted or routed its rows; and a row on which two losses depend is found out.
"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from psg._capture import Captured
from psg._errors import InputError, StateError
from psg._lifted import Lifted, anchor, pull_back
from psg._ops import CARRIES, METADATA, PREDICATES, leaves_of, name_of, substitute
from psg.factors import Factor
from psg.rules import _registry
from psg.rules.leaks import refuse_updates
from psg.rules.rows import ELEMENTWISE, split_rows


def capture_batch(
    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    params: dict[int, str],
    n: int,
    look: Callable[[Any, Any], None],
) -> Captured:
    """Run the pass described at the top of this file.

    Args:
        function: From the tensors of a batch to a tuple of tensors, the first of which are the losses, [n].
        tensors: The function's arguments.
        params: The positions among `tensors` of those to differentiate, and what messages call them.
        n: The number of samples, at least 1.
        look: Called with every op of the function and its arguments.

    Returns:
        The outputs and the factors.

    Raises:
        InputError: A parameter reaches an op that has no rule, or a rule that does not fit.
        StateError: A row depends on two samples.
    """
    tensors = [tensor.detach() for tensor in tensors]
    lifted = {position: Lifted.parameter(tensors[position], None, n) for position in params}
    for position, value in lifted.items():
        value.handle = tensors[position] = tensors[position].detach()
    mode = _BatchMode(n, dict(zip(params.values(), lifted.values(), strict=True)), look)
    with torch.enable_grad(), mode:
        outputs = function(tensors)
    mode.backward(outputs[0])
    values = list(lifted.values())
    pull_back(mode.values, values, n)
    return Captured(tuple(o.detach() for o in outputs), [v.factor(n).detach() for v in values], [v.uses for v in values])


class _Tap(NamedTuple):
    """Where a rule's output joins the graph, and what to make of the cotangent that arrives there."""

    op: str
    edge: GradientEdge
    builders: list[tuple[str, Lifted, Callable[[Any], Factor]]]
    inputs: list[tuple[Tensor, int]]  # what the builders will read, with its version when the rule read it


class _BatchMode(TorchFunctionMode):
    """Watches the calls of the function and routes those that meet a parameter."""

    def __init__(self, n: int, params: dict[str, Lifted], look: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.n = n
        self.look = look
        self.names = {id(value.handle): name for name, value in params.items()}
        self.by_handle = {id(value.handle): value for value in params.values()}
        self.values = list(params.values())  # and, as they appear, the derived ones
        self.taps: list[_Tap] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        self.look(func, (args, kwargs))
        refuse_updates(func, args, kwargs)
        met = [leaf for leaf in leaves_of((args, kwargs)) if id(leaf) in self.by_handle]
        if not met:
            return func(*args, **kwargs)
        if func in PREDICATES:
            return self.by_handle[id(args[0])].ask(func)
        if all(id(leaf) in self.by_handle for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)):
            return self._derive(func, met, args, kwargs)
        output = self._run_rule(func, args, kwargs)
        if output is not NotImplemented:
            return output
        decompose = _registry.find_decomposition(func)
        if decompose is not None:
            with self:
                output = decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        names = ", ".join(self.names[id(leaf)] for leaf in met)
        raise InputError(
            f'method="batch": {names} reaches {name_of(func)} at {_user_line()}, for which there is no rule that fits. Write one with '
            'psg.rule, freeze the parameter, or write fn for one sample and use method="auto".'
        )

    def _derive(self, func: Any, met: list[Tensor], args: Any, kwargs: Any) -> Any:
        """An op on parameters alone is computed once; what comes out is known by its history."""
        args, kwargs = substitute((args, kwargs), self._history)
        output = func(*args, **kwargs)
        several = isinstance(output, (tuple, list))
        parts = list(output) if several else [output]
        for i, part in enumerate(parts):
            if not (isinstance(part, Tensor) and part.requires_grad):
                continue
            lifted = Lifted.derivation(part, self.n)
            carry = CARRIES.get(name_of(func))
            parent = self.by_handle[id(met[0])]
            if carry is not None and parent.value is not None:
                lifted.carry = (parent, carry(parent.value, part))
            lifted.handle = parts[i] = part.detach()
            self.by_handle[id(lifted.handle)] = lifted
            self.names[id(lifted.handle)] = f"{name_of(func)} of {self.names[id(met[0])]}"
            self.values.append(lifted)
            lifted.uses = parent.uses
        for leaf in met:
            self.by_handle[id(leaf)].uses.append(f"{name_of(func)}: derived")
        return tuple(parts) if several else parts[0]

    def _history(self, leaf: Any) -> Any:
        value = self.by_handle.get(id(leaf))
        if value is None:
            return leaf
        return value.root if value.derived is None else value.derived

    def _run_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op's rule with every row of the data as a sample of its own, and tap its output; NotImplemented if none fits."""
        if func in ELEMENTWISE:
            rule = ELEMENTWISE[func]
            args = sorted(args, key=lambda leaf: id(leaf) in self.by_handle)  # it commutes: data first
        else:
            rule = _registry.find_rule(func)
        if rule is None:
            return NotImplemented
        try:
            bound = rule.signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
        own = {name: self.by_handle[id(argument)] for name, argument in bound.arguments.items() if id(argument) in self.by_handle}
        if not own or not set(own) <= set(rule.params):
            return NotImplemented
        split = split_rows(func, bound.arguments, set(own))
        if split is None:
            return NotImplemented
        arguments, join = split
        bound.arguments.update(arguments | {name: value.value for name, value in own.items()})
        if rule.mixed:
            given = {name for name, value in bound.arguments.items() if isinstance(value, Tensor) and name in rule.params}
            bound.arguments["shared"] = given - set(arguments)
        result = rule.run(*bound.args, **bound.kwargs)
        if result is NotImplemented:
            return NotImplemented
        output, builders = result
        if torch.is_grad_enabled():
            inputs = [tensor for name, tensor in bound.arguments.items() if isinstance(tensor, Tensor) and name not in own]
            output, edge = anchor(output)
            targets = [(self.names[id(own[name].handle)], own[name], builders[name]) for name in own]
            versions = [(tensor, tensor._version) for tensor in inputs]
            self.taps.append(_Tap(name_of(func), edge, targets, versions))
        for value in own.values():
            value.uses.append(f"{name_of(func)}: rule")
        return _registry.reshape(output, join(output.shape))

    def backward(self, losses: Tensor) -> None:
        """Two backward passes: the cotangents, and which sample each row of them belongs to."""
        if losses.shape != (self.n,):
            return
        if not losses.requires_grad or not self.taps:
            return
        targets: Any = [tap.edge for tap in self.taps]
        # In [1, 2], so that no sample's cotangent outweighs another's; shuffled, so that no pattern of fn's can look like one of ours.
        weights = 1 + torch.randperm(self.n, generator=torch.Generator().manual_seed(0)).to(losses.device) / self.n
        weights = weights.to(losses.dtype)
        first = torch.autograd.grad(losses, targets, torch.ones_like(losses), allow_unused=True, retain_graph=True)
        second = torch.autograd.grad(losses, targets, weights, allow_unused=True)
        with torch.no_grad():
            for tap, cotangent, weighted in zip(self.taps, first, second, strict=True):
                if cotangent is None or weighted is None:
                    continue
                if any(tensor._version != version for tensor, version in tap.inputs):
                    raise InputError(f'method="batch": an input of {tap.op} was changed in place after {tap.op} had read it.')
                table = _groups(_owners(tap.op, cotangent, weighted, weights), self.n)
                for name, value, build in tap.builders:
                    value.terms.append(value.accept(build(cotangent), f"{name} of {tap.op}", len(cotangent)).regroup(table))


def _owners(op: str, cotangent: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    """Which sample each row belongs to, [rows]; n for a row that no loss depends on.

    Raises:
        StateError: A row's two cotangents are not one weight apart.
    """
    flat, other = (tensor.flatten(1).to(torch.float64) if tensor.ndim > 1 else tensor[:, None].double() for tensor in (cotangent, weighted))
    squared = flat.square().sum(1)
    used = squared > 0
    ratio = (flat * other).sum(1) / torch.where(used, squared, 1)
    ordered, order = weights.double().sort()
    nearest = torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, ratio)
    residual = (other - ordered[nearest][:, None] * flat).square().sum(1).sqrt()
    # Half the distance between two weights is the most that may be rounding; what is negligible beside the largest row may be all of it.
    allowed = 0.25 / len(weights) * squared.sqrt() + 100 * torch.finfo(cotangent.dtype).eps * squared.max().sqrt()
    if bool((residual > allowed).any()):
        raise StateError(
            f'method="batch": the output of {op} has a row on which more than one loss depends, or whose sample rounding hides. Each loss '
            "must depend on rows of its own; normalise over no batch, or use a smaller chunk_size or a wider dtype."
        )
    return torch.where(used, order[nearest], len(weights))


def _groups(owners: Tensor, n: int) -> Tensor:
    """The rows of every sample, [n, most rows of one], filled up with the number of rows."""
    rows = len(owners)
    ordered, order = owners.sort(stable=True)
    counts = torch.bincount(owners, minlength=n + 1)[:n]
    width = max(1, int(counts.max()))
    table = torch.full((n, width), rows, device=owners.device)
    starts = counts.cumsum(0) - counts
    kept = ordered < n
    table[ordered[kept], torch.arange(rows, device=owners.device)[kept] - starts[ordered[kept]]] = order[kept]
    return table


def _user_line() -> str:
    """The innermost line that is neither ours nor torch's."""
    own = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
