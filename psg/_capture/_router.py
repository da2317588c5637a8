"""Routes each call of the function: to a rule, below vmap, to a decomposition into other ops, or on as it is."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

from psg._call import Call
from psg._capture import _ruleless
from psg._capture._agreed import Drawn, asks_for_a_number, run_agreed, with_numbers
from psg._capture._derived import derives, runs_for_each
from psg._capture._inside import LinearOp
from psg._capture._lifted import Lifted, with_history
from psg._capture._once import Once
from psg._capture._operands import Operands, run_rule
from psg._capture._ordinary import FUNCTIONS, is_ordinary, is_pure, reads
from psg._capture._strided import STRIDED, View, for_every_sample, view_of
from psg._capture._written import has_written_backward, run_watched
from psg._errors import Unsupported, UnsupportedByVmap
from psg._torch import _ambient, _autograd, _functions, _functorch, _random
from psg._torch._autocast import cast_of
from psg._torch._higher_order import HIGHER_ORDER
from psg._torch._ops import (
    ARRAYS,
    DETACHING,
    FACTORIES,
    GET_DATA,
    GRAD_FN,
    IS_LEAF,
    LIKENESSES,
    MEMORY_MARKS,
    METADATA,
    PREDICATES,
    REQUIRES_GRAD,
    REQUIRING,
    SET_DATA,
    SHOWING,
    Node,
    draws,
    handle_only,
    handled_by,
    handlers_among,
    is_torchs,
    name_of,
    operands_of,
    place_name,
    places_of,
    replace_at,
    run_handlers,
    substitute,
    target_of,
    tells_numbers,
    tensors_of,
    torchs_arguments,
)
from psg._watch._habits import Habits, Retry
from psg._watch._marks import Marks
from psg._watch._outside import Looking
from psg._watch._writes import changes_nothing, may_copy, written
from psg.rules import _registry
from psg.rules.embedding import LOOKUPS, is_indexing
from psg.rules.leaks import OWN_GENERATOR, refuse_updates
from psg.rules.libraries import run_rows


class Router(Once, Looking):
    """Watches the calls of the function and routes those that meet a lifted value."""

    def __init__(
        self,
        call: Call,
        params: Sequence[Lifted],
        inputs: Sequence[Tensor],
        laid_out: Sequence[Tensor],
        habits: Habits,
        state: _random.State | None,
        views: Sequence[View],
    ) -> None:
        super().__init__(call, params, inputs, laid_out, habits)
        self.views = iter(views)  # that as_strided makes for the first sample alone, if the habits say that fn calls it
        self.state = state  # of the random generators, if every sample draws numbers of its own
        self.outside = call.outside
        self.randomness = call.randomness
        self.redifferentiated = self.differentiated or habits.recorded  # whether gradients that this pass takes are differentiated again
        self.spares_few = habits.lifts is not False and call.kept != "factors"  # who asks for factors gets those of the rules
        self.hooks = _autograd.saved_tensor_hooks()
        self.differentiates = self.nests = False  # whether fn calls autograd, or transforms of its own
        self.has_functions = self.has_written = False  # whether fn calls autograd.Functions; these, or ops of other libraries
        self.has_python_values = False
        self.failure: str | None = None  # the message alone: the error itself would keep all frames alive

    def start(self, samples: Sequence[Tensor], handles: Sequence[Tensor]) -> None:
        """Note vmap's level and the wrappers under which the function holds its arguments, the parameters among them."""
        self.level = _functorch.current_level()
        self.own = Marks(self.level)
        self.own.claim(samples)
        for value, handle in zip(self.params, handles, strict=True):
            if value.value is not None:
                self.hold(value, handle)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            args, kwargs = torchs_arguments(func, args, kwargs) if kwargs else (args, {})
            if self.differentiated:
                args, kwargs = self.outside.replace((args, kwargs))
            tensors, others = operands_of(args, kwargs)
            if types in _USUAL and self._are_own(tensors):
                output = self._run_at_once(func, args, kwargs, tensors, others)
                if output is not NotImplemented:
                    self._claim(func, args, kwargs, tensors, output)
                    return output
            if type(func) not in FUNCTIONS:  # an attribute of tensors, or an op of ATen's
                if changes_nothing(func, args):
                    return None
                func = _registry.namesake(func, kwargs)
            # torch hands a Function the tensors as they are, whatever their classes say of ops.
            if types and func is not custom_function_call and (handlers := handlers_among(types)):
                if not handle_only(handlers, tensors, lambda own: not (own.requires_grad or _functorch.is_wrapped(own))):
                    raise Unsupported(handled_by(handlers[0]))
                return run_handlers(self, handlers, func, types, args, kwargs)
            if func in HIGHER_ORDER:
                with self:
                    return HIGHER_ORDER[func](*args, **kwargs)
            if (cast := cast_of(func, args, kwargs)) is not None and not (cast.narrows and self._may_rule(func, args, kwargs)):
                return cast.run(self, func, args, kwargs)
            mark = self.own.owns(tensors)
            if func in LIKENESSES:
                mark = None
            if others and any(isinstance(other, torch.Generator) for other in others):
                raise Unsupported(OWN_GENERATOR)
            target = target_of(func, args, kwargs)
            if self.aliases.outdated:
                self.aliases.read(name_of(func), tensors)
            output = self._route(func, args, kwargs, tensors, target)
            if output is NotImplemented and (body := _registry.body_of(func)) is not None:
                with self:
                    return body(*args, **kwargs)
            self.has_written = self.has_written or has_written_backward(func)
            if func is custom_function_call:
                self.has_functions = True
                if (why := _functions.unbatched(args[0], tensors, output, self.level)) is not None:
                    raise Unsupported(why)
            if id(output) not in self.by_handle:
                output = self.aliases.note(func, args, kwargs, tensors, output)
            if self.state is not None and draws(func, args, kwargs) and not _random.same_state(self.state, now := _random.now(self.state)):
                mark, self.state = self.own.drawn, now
                self.own.assumed = self.own.drawn
            if mark is not None:
                self._claim(func, args, kwargs, tensors, output, target, mark)
            else:
                self.note_constant(func, args, kwargs, tensors, output)
            return output
        except Exception as error:
            self.failure = str(error)
            raise

    def _claim(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any, target: Any = None, mark: object | None = None
    ) -> None:
        """Mark what a call on tensors of this pass has made, of constants computed from parameters too."""
        self.own.claim(output, target, mark)
        if target is None and self.constants and self.own.has_marked(tensors):
            self.own.mark(output, tensors)
            self.has_python_values |= tells_numbers(func, args, kwargs)

    def _are_own(self, tensors: list[Tensor]) -> bool:
        """Whether tensors are this pass' and constants alone, of which nothing has to be noted or refused, and none is sparse."""
        found = False
        for tensor in tensors:
            if tensor.requires_grad or tensor.layout is not torch.strided:
                return False
            mark = tensor.__dict__.get("_psg_pass")
            if mark is not None and mark is not self.own.made:
                return False
            found = found or mark is not None
        if not found or self.aliases.outdated or torch._C._is_any_autocast_enabled():
            return False
        return _functorch.current_level() == self.level and _autograd.saved_tensor_hooks() == self.hooks

    def _run_at_once(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], others: list[Any]) -> Any:
        """Run a call on such tensors by its rule, or as it is; NotImplemented if other tables of psg's have more to say of it."""
        rule, lifts = _registry.find_rule(func), self._meets_lifted(tensors)
        if rule is not None:
            if self.redifferentiated or not self.habits.ruled or not reads(func) or self.state is not None and draws(func, args, kwargs):
                return NotImplemented
            if lifts and self._declines_few(rule, tensors):
                if not is_pure(func, args, kwargs, tensors, others, self.redifferentiated):
                    return NotImplemented
                self._note_lifted(func, self.lifted_among(tensors))
                return self._run_for_each(func, args, kwargs)
            output = self._run_rule(func, rule, args, kwargs) if lifts or rule.takes_data_alone else NotImplemented
            if output is not NotImplemented:
                return output
        if not lifts and is_pure(func, args, kwargs, tensors, others, self.redifferentiated):
            output = self._call(func, args, kwargs)
            return self.aliases.note(func, args, kwargs, tensors, output) if may_copy(func) else output
        return NotImplemented

    def _run_for_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call whose parameters are few numbers, each sample's own: below vmap where that takes fewer ops."""
        run = None if kwargs else _registry.find_form_of_each(func)
        given = [argument for argument in args if argument is not None]
        if run is not None and all([isinstance(argument, Tensor) for argument in given]):
            output = _functorch.run_below(run, given, self.level, self.n)
            if output is not NotImplemented:
                return output
        return self._call(func, args, kwargs)

    def _declines_few(self, rule: _registry.Rule, tensors: list[Tensor], inside: bool = False) -> bool:
        """Whether a rule leaves a call on few numbers to vmap."""
        return rule.declines_few and self.spares_few and self.are_few(tensors, inside)

    def prefers_lifting(self) -> bool:
        """After the function has run: whether it is faster to lift the few numbers computed from parameters, beside which nothing is large.

        To compute them once takes a step to lift each result, and a step to pull its gradient back. Where all samples compute their own,
        vmap and autograd run these ops like all others. Not where fn takes a number from them: vmap may round those of each sample
        otherwise. What is true of all samples stays so: of masks, such as the checks that torch.distributions makes, fn may take values.
        """
        if self.has_python_values:
            return False
        made = [(value, *value.made_by) for value in self.values if value.made_by is not None]
        few = [(step.name, value, *parents) for value, step, parents in made if all(each.is_little for each in (value, *parents))]
        if not few or not all(runs_for_each(*each) for each in few):
            return False
        own = {id(value) for _, value, *_ in few}
        # A small product takes no longer without its rule. But taps do not show what fn's own transforms and derivatives compute from one.
        ruled = [tap for tap in self.taps if self.differentiates or self.nests or not runs_for_each(tap.op, tap)]
        used = {id(value) for tap in ruled for _, value, _ in tap.builders}
        used.update(id(parent) for value, _, parents in made if id(value) not in own for parent in parents)
        return used.isdisjoint(own)

    def _may_rule(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call may run by a rule for lifted values: rules for ops that autocast narrows cast the one value by themselves."""
        if self.habits.recorded or self._rule_of(func) is None:
            return False
        here = _functorch.current_level() == self.level
        return here and self._meets_lifted(tensors_of(args, kwargs))

    def _meets_lifted(self, tensors: list[Tensor]) -> bool:
        return not self.by_handle.keys().isdisjoint(map(id, tensors))

    def _route(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], target: Any) -> Any:
        """Run a call by a rule, below vmap, or as it is; NotImplemented for a `psg.primitive` that has no rule for it."""
        here = _functorch.current_level() == self.level  # not inside a transform of the function's own
        self.nests |= not here
        if here and target is None and is_ordinary(func, tensors, kwargs) and not self._meets_lifted(tensors):
            if any([tensor.requires_grad for tensor in tensors]):
                self._look(func, tensors)
            self._expect_own_hooks()
            return self._call(func, args, kwargs)
        self._look(func, tensors)
        if target is not None:
            if here and isinstance(target, Tensor):
                output = self._rewrite(func, args, kwargs, target)
                if output is not NotImplemented:
                    return output
            self._protect(name_of(func), target)
        refuse_updates(func, args, kwargs, target)
        if func is Tensor.register_hook:
            raise Unsupported("fn, or a tool such as FlopCounterMode, registers a hook on a tensor")
        if func in MEMORY_MARKS and (self.rewrites or not self._meets_lifted(tensors)):
            raise UnsupportedByVmap("fn asks whether a tensor is a view, or how often it was written into")
        if not here and func == GET_DATA:
            raise Unsupported(".data inside a torch.func transform is a constant for that transform alone")
        if func in PREDICATES:
            answer = self._ask(func, args[0])
            return Node(answer, self._refuse) if func == GRAD_FN and answer is not None else answer
        if here:
            if func in _AUTOGRAD:
                return self._run_autograd(func, args, kwargs, tensors)
            self._expect_own_hooks()
            if isinstance(kwargs.get("out"), Tensor) and is_torchs(func):
                return self._run_into(func, args, **kwargs)
        if func in SHOWING:
            self.aliases.show(args[0])
        if func == SET_DATA or func is Tensor.set_:
            self.own.forget_new(args[0])
        if func in STRIDED:
            output = self._run_strided(func, args, kwargs, tensors, here)
            if output is not NotImplemented:
                return output
        output = self._run_known(func, args, kwargs, tensors, here)
        if output is not NotImplemented or _registry.body_of(func) is not None:
            return output
        output = run_agreed(self, func, args, kwargs, tensors, here, constants=not self.habits.fills)
        if output is not NotImplemented:
            return output
        if not here:
            return self._run_elsewhere(func, args, kwargs)
        lifted = self.lifted_among(tensors)
        return self._run_lifted(func, lifted, args, kwargs) if lifted else self._run_unlifted(func, args, kwargs)

    def _look(self, func: Any, tensors: list[Tensor]) -> None:
        self.outside.look(func, tensors, (), self.level)
        for tensor in tensors:
            # nn.Parameter and Variable, which no function mode sees, require it of this vmap's wrapper, below which autograd records.
            if tensor.requires_grad and _functorch.is_batched(tensor, self.level):
                self._require_grad(Tensor.requires_grad_, tensor)

    def expect_agreed(self, tensor: Tensor) -> None:
        """Refuse a Python value that depends on random numbers.

        If the pass went on where all samples happen to agree, or again where some do, with new numbers for them, then samples would agree
        more often than they should.

        Raises:
            Drawn: It does.
            Retry: It was computed for every sample, by another op than for one, and may be rounded otherwise.
        """
        if self.habits.lifts and tensor.dtype != torch.bool:
            raise Retry("fn takes a number", lifts=False)
        self.has_python_values = True
        if self.own.is_drawn(tensor):
            raise Drawn(
                'fn takes a Python value from random numbers, of which every sample draws its own; with randomness="same" all draw the same'
            )

    def _expect_own_hooks(self) -> None:
        if _autograd.saved_tensor_hooks() != self.hooks:
            raise Unsupported("fn saves tensors through hooks, as activation checkpointing does, which run after vmap has ended")

    # The function's own calls of autograd

    def _run_autograd(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run a call of autograd for every sample, or for a transform of the function's own whose tensors it gets (in torch.func.vjp)."""
        if func in DETACHING:
            return self._detach(*args)
        if func != torch.autograd.grad:
            return self._require_grad(func, *args, **kwargs)
        return (_differentiate_elsewhere if any(map(self._is_elsewhere, tensors)) else self._differentiate)(*args, **kwargs)

    def _require_grad(self, func: Any, tensor: Tensor, requires_grad: bool = True) -> Tensor:
        """`tensor.requires_grad_()` for every sample's tensor: below vmap they are one tensor."""
        if id(tensor) in self.by_handle:
            if not requires_grad:
                raise Unsupported("fn calls requires_grad_(False) on a parameter")
            return tensor
        if not _functorch.is_batched(tensor, self.level):
            if tensor.requires_grad == requires_grad:
                return tensor  # torch.func forbids it even where it changes nothing
            if self.constants:
                raise Retry("requires_grad_ of what may be computed from parameters", derives=False)
            return func(tensor, requires_grad)
        with _functorch.below():
            _functorch.value_of(tensor).requires_grad_(requires_grad)
        return tensor

    def _detach(self, tensor: Tensor) -> Tensor:
        """`tensor.detach_()` for every sample's tensor: below vmap they are one tensor."""
        if id(tensor) in self.by_handle:
            raise Unsupported("fn calls detach_() on what it computes from parameters alone: use detach()")
        if not _functorch.is_batched(tensor, self.level):
            return tensor.detach_()
        with _functorch.below():
            _functorch.value_of(tensor).detach_()
        return tensor

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return _functorch.is_wrapped(tensor) and not _functorch.is_batched(tensor, self.level)

    def _differentiate(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` for all samples at once: of the sum of their outputs, since samples do not interact."""
        if self.differentiated:
            raise Unsupported("fn calls torch.autograd.grad, and the result has a derivative")
        if not self.habits.recorded:
            # Run again with rules whose outputs have derivatives of every order.
            raise Retry("fn calls torch.autograd.grad", recorded=True)
        if self.habits.ruled and self.lifted_among(tensors_of((inputs,), {})):
            # Only lifting gives gradients for parameters: a derived value's leaf is detached from its parameter, and a rule's output can
            # be differentiated for the data alone.
            raise Retry("fn calls torch.autograd.grad for parameters", ruled=False, derives=False)
        self.differentiates = True
        outputs, inputs = ([item] if isinstance(item, Tensor) else list(item) for item in (outputs, inputs))
        options: dict[str, Any] = {"create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize_grads}
        if is_grads_batched:
            rows = [own.unbind() for own in ([grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs)]
            each = [self._differentiate(outputs, inputs, row, **options) for row in zip(*rows, strict=True)]
            if not each:
                raise Unsupported("fn calls torch.autograd.grad with is_grads_batched=True and no row of grad_outputs")
            return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))
        if not all(_functorch.is_batched(tensor, self.level) for tensor in (*outputs, *inputs)):
            # fn made a tensor to differentiate for, which all samples share; the next pass makes one for each sample.
            raise RuntimeError("torch.autograd.grad of or for a tensor that is the same for all samples")
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else [None] * len(outputs) if grad_outputs is None else grad_outputs
        if any(own is None and output.numel() != 1 for own, output in zip(given, outputs, strict=True)):
            raise Unsupported("fn calls torch.autograd.grad without grad_outputs for an output that is no scalar")
        cotangents = [torch.ones_like(output) if own is None else own for own, output in zip(given, outputs, strict=True)]
        with _functorch.below():
            sides = [[_functorch.physical(tensor, self.level, self.n) for tensor in group] for group in (outputs, cotangents)]
            targets = [_functorch.value_of(tensor) for tensor in inputs]
            found = torch.autograd.grad(sides[0], targets, sides[1], retain_graph=True, **options)
        return tuple(None if own is None else _functorch.wrap_like(own, tensor) for own, tensor in zip(found, inputs, strict=True))

    def _ask(self, func: Any, tensor: Tensor) -> Any:
        """What autograd knows of a tensor; vmap's wrapper alone does not tell what is differentiated beneath it."""
        if id(tensor) in self.by_handle:
            return self.ask(func, tensor)
        answers = [self.ask(func, own) for own in _functorch.layers(tensor)]
        if func == IS_LEAF:
            return all(answers)
        return next((answer for answer in answers if answer), answers[0])

    def _refuse(self, what: str) -> None:
        self.failure = f"fn uses {what}"
        raise Unsupported(self.failure)

    # Calls that a pass refuses

    def _protect(self, op: str, target: Any) -> None:
        """Refuse to write into memory that the caller owns or that samples share, through any views and wrappers."""
        tensors = written(target)
        memories = set(map(_functorch.memory_of, tensors))
        if memories & self.owned:
            raise Unsupported(f"{op} writes into a parameter, or a view of one")
        # vmap has no batching rules for ops that write into lists of tensors, so lifting the constants would not help there.
        if memories & self.derived_at or not isinstance(target, list) and memories & self.constants_at:
            # All samples share the value only because it was computed once. Lifted, each sample has its own.
            raise Retry(f"{op} writes into a value computed from parameters", derives=False)
        self.aliases.write(op, tensors)
        if memories & self.given:
            # For example an in-place activation on the sample itself: on a copy, it does not reach the caller's tensor.
            raise Retry(f"{op} writes into an input, or a view of one", copied=True)

    # The ways to run a call

    def _run_known(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: bool) -> Any:
        """Run a call as an embedding lookup, by the op's rule, or decomposed into other ops; NotImplemented if none of these fits."""
        is_of_table = self._is_of_table(func, args)
        if is_of_table and here and self.habits.ruled:
            output = self._look_up(func, args, kwargs)
            if output is not NotImplemented:
                return output
        rule = None if is_of_table else self._rule_of(func)
        if rule is not None and self._declines_few(rule, tensors, inside=not here or self.habits.recorded):
            rule = None
        if rule is not None and (not here or rule.takes_data_alone or self._meets_lifted(tensors)):
            run = self._run_rule if here and not self.habits.recorded else self._run_inside
            output = run(func, rule, args, kwargs)
            if output is not NotImplemented:
                return output
        # This pass differentiates the gradients that a transform of the function's own has taken.
        decompose = _registry.find_decomposition(func, differentiated=not here or self.redifferentiated)
        if decompose is None or self._may_derive(func, args, kwargs) and not any(map(_functorch.is_wrapped, self._others(args, kwargs))):
            return NotImplemented  # no decomposition, or an op on parameters alone, which is derived in one step
        with self:
            return decompose(*args, **kwargs)

    def _run_strided(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: bool) -> Any:
        """Run as_strided of what the samples compute, if they lie in memory as one alone does; NotImplemented for other tensors."""
        if any(map(_functorch.is_wrapped, tensors[1:])):  # sizes, which come back as numbers
            return with_numbers(self, func, args, kwargs)
        view = next(self.views, None)
        if not here or not _functorch.is_batched(tensors[0], self.level) or self._meets_lifted(tensors):
            return NotImplemented
        if not self.habits.strided:
            raise Retry("fn calls as_strided, whose result depends on how a sample lies in memory", strided=True)
        if view is None or view != view_of(*args, **kwargs):
            return NotImplemented
        return for_every_sample(tensors[0], view, self.level, self.n)

    def _run_into(self, func: Any, args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        """Run an op that writes into its `out` argument, which vmap cannot run."""
        with self:
            result = func(*args, **kwargs)
            if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
                raise Unsupported(f"{name_of(func)} writes into an out= tensor of another shape or an unfit dtype")
            if torch.is_grad_enabled() and any(self._ask(REQUIRES_GRAD, tensor) for tensor in (result, out)):
                raise Unsupported(f"{name_of(func)} is differentiated and has an out= tensor, which torch does not support")
            return out.copy_(result)

    def _rule_of(self, func: Any) -> _registry.Rule | None:
        """The rule of an op; in a pass that is differentiated only one that can be, for lifted values outside of transforms of fn's own."""
        rule = _registry.find_rule(func) if self.habits.ruled else None
        if rule is None or not self.differentiated:
            return rule
        here = _functorch.current_level() == self.level
        return rule._replace(frozen=False) if rule.differentiable and here else None

    def _is_of_table(self, func: Any, args: Any) -> bool:
        """Whether an op takes rows of a parameter, or of what is computed from parameters: no data that its rule would take."""
        return func in LOOKUPS and bool(args) and id(args[0]) in self.by_handle

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Rows of a parameter at each sample's own indices, as an embedding; NotImplemented for other indices, and for few numbers."""
        index = args[-1] if len(args) > 1 else None
        indices = tensors_of((index,), {})
        if kwargs or self.by_handle[id(args[0])].value is None or not any(_functorch.is_batched(tensor, self.level) for tensor in indices):
            return NotImplemented
        if self.spares_few and self.are_few([args[0], *indices], inside=True):
            return NotImplemented
        with self:
            return LOOKUPS[func](*args)

    def _run_lifted(self, func: Any, lifted: list[Lifted], args: Any, kwargs: Any) -> Any:
        """Run an op on lifted values that has no rule: once if on parameters alone, else under vmap as it is."""
        if (cast := cast_of(func, args, kwargs)) is not None:
            return cast.run(self, func, args, kwargs)
        output = self._derive(func, lifted, args, kwargs)
        if output is not NotImplemented:
            return output
        self._avoid_leak(func, args, kwargs)
        self._note_lifted(func, lifted)
        return self._run(func, args, kwargs)

    def _run_elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that has no rule inside a transform of the function's own: once if on parameters alone, else by that transform."""
        if derives(func, args, kwargs):
            held, options = substitute((args, kwargs), self._held)
            lifted = self.lifted_among(tensors_of(held, options))
            output = self._derive(func, lifted, held, options) if lifted else NotImplemented
            if output is not NotImplemented:
                return output
        self._avoid_leak(func, args, kwargs)
        if _functions.lacks_vmap_rule(func, args):
            raise Unsupported(f"{_ruleless.described(args[0])} runs inside a transform of fn's own")
        self._note_lifted(func, self.lifted_among([_functorch.innermost(tensor, self.level) for tensor in tensors_of(args, kwargs)]))
        if func is torch.autograd.grad:
            return _differentiate_elsewhere(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _run_unlifted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that uses no lifted value; if it makes a tensor that the function may write into, make one for every sample."""
        if kwargs.get("requires_grad") is True:
            with self:
                return func(*args, **{**kwargs, "requires_grad": False}).requires_grad_()
        self._avoid_leak(func, args, kwargs)
        output = self._run(func, args, kwargs)
        if func in ARRAYS and _functorch.memory_of(args[0]) in self.owned | self.derived_at | self.constants_at:
            output.setflags(write=False)  # a write would reach a parameter of the caller's, or a constant that psg uses again
        if not self.habits.fills or not any(func in kind for kind in FACTORIES[: self.habits.fills]):
            return output
        if not isinstance(output, Tensor) or _functorch.is_wrapped(output) or any(output is arg for arg in args):
            return output
        with _functorch.below():
            output = output.expand(self.n, *output.shape).clone()
        return _functorch.wrap(output, self.level)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op as it is, or in a way of psg's own if vmap has no batching rule for it."""
        if _functions.lacks_vmap_rule(func, args):
            return self._run_function(func, args, kwargs)
        if _functorch.lacks_batching(func):
            output = run_rows(func, args, kwargs, self.level, self.n)
            if output is not NotImplemented:
                return output
            wrapped = [tensor for tensor in tensors_of(args, kwargs) if _functorch.is_wrapped(tensor)]
            if wrapped and not any(map(self._is_elsewhere, wrapped)):
                return _ruleless.one_by_one(func, args, kwargs, wrapped, self.level, self.n)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is custom_function_call:
            return run_watched(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not asks_for_a_number(error):
                raise
        return with_numbers(self, func, args, kwargs)

    def _run_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an autograd.Function whose rule for vmap torch has not generated."""
        apart = None if self.redifferentiated else self.habits.apart
        output, left = _ruleless.run_function(func, args, kwargs, self.level, self.n, self.randomness, apart)
        if left:
            self._leave(args[0], left)
        return output

    def _leave(self, function: Any, changes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write into the arguments of an autograd.Function what it has left in the copies, unrecorded as its own writes are."""
        if not all(_functorch.is_batched(tensor, self.level) for tensor, _ in changes):
            raise Unsupported(f"{_ruleless.writing(function)}, which all samples share")
        self.own.claim([value for _, value in changes])
        with self, torch.no_grad():
            for tensor, value in changes:
                tensor.copy_(value)

    def _held(self, leaf: Any) -> Any:
        """Unwrap a parameter, or a constant, that a transform of the function's own has wrapped without batching or differentiating it."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.by_handle:
            return leaf
        bare = _functorch.without_constant_wrappers(leaf, self.level)
        return bare if id(bare) in self.by_handle or not _functorch.is_wrapped(bare) else leaf

    def _run_inside(self, func: Any, rule: _registry.Rule, args: Any, kwargs: Any) -> Any:
        """Run the rule so that fn itself may differentiate the op for its data, or batch it; NotImplemented if it does not fit the call."""
        arguments = rule.bind(*substitute((args, kwargs), self._held))
        if arguments is None:
            return NotImplemented
        places = {place: self.by_handle[id(argument)] for place, argument in places_of(arguments) if id(argument) in self.by_handle}
        if not places or any(place[0] not in rule.params or value.value is None for place, value in places.items()):
            return NotImplemented
        rewrite = _registry.find_transposable_form(func)
        if rewrite is not None:
            with self:
                output = rewrite(**arguments, shared=set(map(place_name, places)))
            if output is not NotImplemented:
                return output
        transpose = _registry.find_transpose(func)
        if transpose is None:
            return NotImplemented
        own = {name: value for (name, _), value in places.items()}
        data = arguments.get(transpose.data)
        others = {name: argument for name, argument in arguments.items() if name not in own and name != transpose.data}
        if not isinstance(data, Tensor) or transpose.data in own or not _functorch.is_wrapped(data):
            return NotImplemented
        if any(map(_functorch.is_wrapped, tensors_of((), others))):
            return NotImplemented  # an argument beside the data differs from sample to sample
        linear = LinearOp(self, func, own, others, self.habits.recorded)
        unfit = _ambient.is_autocast(data) or not _functorch.can_descend(self.level)
        return NotImplemented if unfit or linear.transposed(data.shape) is None else linear(data)

    def _run_rule(self, func: Any, rule: _registry.Rule, args: Any, kwargs: Any) -> Any:
        """Run the rule on the physical batch and tap its output; NotImplemented if it does not fit this call."""
        op = name_of(func)
        arguments = rule.bind(args, kwargs)
        if arguments is None:
            return NotImplemented
        operands = Operands.of(self, rule, arguments)
        once = Tensor.__getitem__ if func is F.embedding and is_indexing(**arguments) else func
        if operands is None or not operands.are_worth(name_of(once), rule, lambda: self._may_derive(once, args, kwargs)):
            return NotImplemented
        own, data, shared = operands.own, operands.data, operands.shared
        if operands.numbers:
            arguments = replace_at(arguments, operands.numbers)

        def run(*inputs: Tensor) -> Any:
            # In a pass that is differentiated the parameters have histories.
            given = dict(zip(data, with_history(inputs) if own and not self.differentiated else inputs, strict=True))
            return run_rule(self, op, rule, arguments, own, given, shared, self.n)

        output = _functorch.run_below(run, list(data.values()), self.level, self.n)
        if output is NotImplemented:
            return NotImplemented
        self._note_lifted(func, self.lifted_among([*data.values()]))
        return output


_AUTOGRAD = {torch.autograd.grad, *DETACHING, *REQUIRING}
_USUAL: tuple[Any, ...] = ((), (Tensor,))
"""The classes of tensors that a mode is told of, where there are no others than torch's own."""


def _differentiate_elsewhere(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, allow_unused: bool = False, **kwargs: Any
) -> Any:
    """`torch.autograd.grad` for a transform of the function's own.

    The transform asks which outputs require grad, and is told that values derived from parameters do; but these do not depend on its data.
    Leave out the outputs that have no history here.
    """
    recorded = [output.requires_grad for output in outputs] if allow_unused else [True]
    if not any(recorded):
        return (None,) * len(inputs)
    if not all(recorded):
        outputs, grad_outputs = (part and tuple(itertools.compress(part, recorded)) for part in (outputs, grad_outputs))
    return torch.autograd.grad(outputs, inputs, grad_outputs, *args, allow_unused=allow_unused, **kwargs)
