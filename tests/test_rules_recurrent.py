"""Recurrent layers and cells over drawn shapes, options and states: plain nn modules, their own parameters."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem, ids, normal, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export.passes import move_to_device_pass
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import psg
import psg.rules.recurrent
from psg.testing import assert_trees_close, layouts, loop_grad, loop_value_and_grad, tensors
from psg.testing._loop import tree_map

LAYERS = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}
CELLS = {
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
each_layer = pytest.mark.parametrize("kind", LAYERS)
each_cell = pytest.mark.parametrize("kind", CELLS)


def listed(state):
    """The states of a call as a tuple: a single state comes as a tensor."""
    return state if isinstance(state, tuple) else (state,)


def trained(draw, module):
    """A drawn subset of the module's parameters, one of them at least; the others are frozen."""
    own = {name: draw(tensors(p.shape)) for name, p in parameters(module).items()}
    module.requires_grad_(False).load_state_dict(own)
    names = draw(st.lists(st.sampled_from(sorted(own)), min_size=1, unique=True))
    return {name: own[name] for name in names}


def initial(draw, n, shapes):
    """(parameters, batched argument, function of both to the states): none, constant, per sample, learned, derived from a parameter."""
    origin = draw(st.sampled_from(["none", "constant", "sample", "parameter", "derived", "mixed"]))
    drawn = [draw(tensors(shape)) for shape in shapes]
    own = [draw(tensors((n, *shape))) for shape in shapes]
    together = (lambda states: states[0]) if len(shapes) == 1 else tuple
    if origin == "none":
        return {}, own, lambda p, own: None
    if origin == "constant":
        return {}, own, lambda p, own: together([h.to(own[0].device) for h in drawn])
    if origin == "sample":
        return {}, own, lambda p, own: together(own)
    params = {f"state{k}": h for k, h in enumerate(drawn)}
    if origin == "parameter":
        return params, own, lambda p, own: together([p[name] for name in params])
    if origin == "derived":
        return params, own, lambda p, own: together([(2 * p[name]).tanh() for name in params])
    return params, own, lambda p, own: together([p[name] * h for name, h in zip(params, own, strict=True)])


@st.composite
def layer_problems(draw, kind):
    """Every option of the module; the loss reads the output, the last states, or some of them."""
    n, features, hidden, time = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    layers, bidirectional, bias = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
    projection = draw(st.integers(0, hidden - 1)) if kind == "lstm" else 0
    batch_first = draw(st.booleans())
    options = {"proj_size": projection} if projection else {}
    module = LAYERS[kind](
        features,
        hidden,
        num_layers=layers,
        bidirectional=bidirectional,
        bias=bias,
        batch_first=batch_first,
        dropout=0.5 * (layers > 1),
        **options,
    )
    module.train(draw(st.booleans()) and layers == 1)
    batch = draw(st.sampled_from([None, 1, 2]))  # fn's own batch size; None for an unbatched input
    shape = (time,) if batch is None else (batch, time) if batch_first else (time, batch)
    own_batch = () if batch is None else (batch,)
    widths = [projection or hidden, hidden] if kind == "lstm" else [hidden]
    learned, own, states = initial(draw, n, [((1 + bidirectional) * layers, *own_batch, width) for width in widths])
    below = draw(st.booleans())  # whether the input has a gradient
    params = {"layer": trained(draw, module), "states": learned, "below": draw(tensors((features, features)))}
    used = draw(st.lists(st.sampled_from(["output", *range(len(widths))]), min_size=1, unique=True))

    def fn(p, x, own):
        x = F.linear(x, p["below"]) if below else x
        output, last = functional_call(module.to(x.device), p["layer"], (x, states(p["states"], own)))
        results = {"output": output, **dict(enumerate(listed(last)))}
        return sum(score(results[name]) for name in used)

    return Problem(fn, (params, draw(layouts(draw(tensors((n, *shape, features))))), own))


@each_layer
@given(data=st.data())
def test_layers(kind, data, device):
    assert_agrees(on(data.draw(layer_problems(kind)), device))


@st.composite
def cell_problems(draw, kind):
    """A cell called once for each step."""
    n, features, hidden, steps = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    module = CELLS[kind](features, hidden, bias=draw(st.booleans()))
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    learned, own, states = initial(draw, n, [(*batch, hidden)] * (1 + (kind == "lstm")))
    below = draw(st.booleans())
    params = {"cell": trained(draw, module), "states": learned, "below": draw(tensors((features, features)))}

    def fn(p, x, own):
        x, state, loss = F.linear(x, p["below"]) if below else x, states(p["states"], own), 0
        for t in range(steps):
            state = functional_call(module.to(x.device), p["cell"], (x[t], state))
            loss = loss + score(listed(state)[-1])
        return loss

    return Problem(fn, (params, draw(tensors((n, steps, *batch, features))), own))


@each_cell
@given(data=st.data())
def test_cells(kind, data, device):
    assert_agrees(on(data.draw(cell_problems(kind)), device))


# --- whole models -------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Embedding, layers, head; `lengths` are those of padded sequences."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layers = LAYERS[kind](4, 5, batch_first=True, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        output, _ = self.layers(self.embedding(tokens))
        if lengths is None:
            return self.head(output[:, -1])
        return self.head(output.gather(1, (lengths - 1).reshape(-1, 1, 1).expand(-1, 1, 5))[:, 0])


@each_layer
def test_classifier(kind, device):
    model = Classifier(kind, num_layers=2).to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    assert_agrees(Problem(loss, (params, ids(11, 5, 7).to(device), ids(3, 5).to(device))))


@each_layer
def test_padded_batch_with_lengths(kind, device):
    model = Classifier(kind, bidirectional=False).to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    lengths = torch.tensor([1, 7, 3, 7, 2], device=device)
    assert_agrees(Problem(loss, (params, ids(11, 5, 7).to(device), lengths, ids(3, 5).to(device))))


@each_layer
def test_padded_batch_with_a_mask(kind, device):
    module = LAYERS[kind](3, 4, batch_first=True).to(device)

    def fn(p, x, length):
        output, _ = functional_call(module, p, (x[None],))
        mask = torch.arange(len(x), device=x.device) < length
        return score(torch.where(mask[:, None], output[0], 0).sum(0) / length)

    assert_agrees(Problem(fn, (parameters(module), normal(4, 6, 3).to(device), torch.tensor([6, 1, 4, 2], device=device))))


@st.composite
def packed_problems(draw, kind):
    """A pack of fn's own sequences, with lengths shared by all samples or one of two patterns for each."""
    n, batch, time, layers = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    bidirectional, batch_first = draw(st.booleans()), draw(st.booleans())
    options = {"proj_size": 2} if kind == "lstm" and draw(st.booleans()) else {}
    module = LAYERS[kind](2, 3, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, **options)
    widths = [options.get("proj_size", 3), 3] if kind == "lstm" else [3]
    learned, own, states = initial(draw, n, [((1 + bidirectional) * layers, batch, width) for width in widths])
    patterns = draw(st.lists(st.lists(st.integers(1, time), min_size=batch, max_size=batch), min_size=1, max_size=2))
    lengths = torch.tensor([patterns[k % len(patterns)] for k in range(n)], dtype=torch.int64).reshape(n, batch)
    total = draw(st.sampled_from([None, time + 1]))

    def fn(p, x, own, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=batch_first, enforce_sorted=False)
        output, last = functional_call(module.to(x.device), p["layer"], (packed, states(p["states"], own)))
        padded, found = nn.utils.rnn.pad_packed_sequence(output, batch_first=batch_first, padding_value=0.5, total_length=total)
        return score(padded) + score(padded.sum() * found.to(x)) + sum(score(state) for state in listed(last))

    x = draw(tensors((n, *((batch, time) if batch_first else (time, batch)), 2)))
    return Problem(fn, ({"layer": trained(draw, module), "states": learned}, x, own, lengths))


@each_layer
@given(data=st.data())
def test_packed_sequences(kind, data, device):
    assert_agrees(on(data.draw(packed_problems(kind)), device))


def packed_loss(kind, device):
    module = LAYERS[kind](3, 4, batch_first=True).to(device)

    def fn(p, x, length):
        packed = nn.utils.rnn.pack_padded_sequence(x[None], length[None].cpu(), batch_first=True)
        return score(listed(functional_call(module, p, (packed,))[1])[0])

    return fn, parameters(module)


@each_layer
def test_a_length_of_its_own_for_every_sample_takes_the_loop(kind, device):
    fn, params = packed_loss(kind, device)
    args = params, normal(4, 6, 3).to(device), torch.tensor([6, 1, 4, 2], device=device)
    with pytest.warns(psg.FallbackWarning, match="different Python values"):
        psg.per_sample_grad(fn)(*args)
    assert_agrees(Problem(fn, args), may_fall="packing asks for the length")


@each_layer
def test_lengths_of_zero_are_an_error_of_torch(kind, device):
    fn, params = packed_loss(kind, device)
    with pytest.raises(RuntimeError, match="has to be greater than 0"):
        psg.per_sample_grad(fn)(params, normal(3, 6, 3).to(device), torch.tensor([5, 0, 5], device=device))


@each_layer
def test_a_packed_sequence_made_by_hand(kind, device):
    module = LAYERS[kind](3, 4, bidirectional=True).to(device)

    def fn(p, x):
        packed = nn.utils.rnn.PackedSequence(x, torch.tensor([2, 1, 1]))
        return score(functional_call(module, p, (packed,))[0].data)

    assert_agrees(Problem(fn, (parameters(module), normal(3, 4, 3).to(device))))


@each_layer
def test_time_first_batches(kind, device):
    module = LAYERS[kind](3, 4, bidirectional=True).to(device)
    fn = lambda p, x, y: score(functional_call(module, p, (x,))[0] - y)  # noqa: E731
    args = parameters(module), normal(6, 5, 3).to(device), normal(5, 8).to(device)
    assert_agrees(Problem(fn, args, options={"in_dims": (None, 1, 0)}))


@each_layer
def test_one_layer_called_many_times(kind, device):
    module = LAYERS[kind](4, 4, batch_first=True).to(device)

    def fn(p, x, y):
        first, last = functional_call(module, p, (x[None],))
        second, _ = functional_call(module, p, (y[None], last))
        third, _ = functional_call(module, p, (torch.cat([first, second], 1).tanh(),))
        return score(third)

    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 4).to(device), normal(3, 2, 4).to(device))))


def test_encoder_and_decoder(device):
    # A decoder of cells that reads its own last prediction.
    modules = nn.ModuleDict({"encoder": nn.GRU(3, 4, batch_first=True), "cell": nn.LSTMCell(2, 4), "head": nn.Linear(4, 2)}).to(device)

    class Translate(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = modules
            self.start = nn.Parameter(normal(1, 2).to(device))

        def forward(self, x, steps):
            _, h = self.parts["encoder"](x)
            state, y, ys = (h[0], torch.zeros_like(h[0])), self.start, []
            for _ in range(steps):
                state = self.parts["cell"](y, state)
                y = self.parts["head"](state[0])
                ys.append(y)
            return torch.stack(ys, 1)

    model = Translate()
    fn = lambda p, x, y: F.mse_loss(functional_call(model, p, (x[None], 4)), y[None])  # noqa: E731
    assert_agrees(Problem(fn, (parameters(model), normal(3, 6, 3).to(device), normal(3, 4, 2).to(device))))


def test_layers_of_every_kind_in_a_row(device):
    modules = nn.ModuleList(LAYERS[kind](3, 3, batch_first=True) for kind in LAYERS).to(device)
    params = parameters(modules)

    def fn(p, x):
        x = x[None]
        for k, module in enumerate(modules):
            own = {name.partition(".")[2]: value for name, value in p.items() if name.startswith(f"{k}.")}
            x = x + functional_call(module, own, (x,))[0]
        return score(x)

    assert_agrees(Problem(fn, (params, normal(3, 5, 3).to(device))))


# --- parameters of other kinds ------------------------------------------------------------------------------


@each_layer
def test_a_frozen_layer_passes_the_gradient_on(kind, device):
    module = LAYERS[kind](3, 4, num_layers=2, bidirectional=True).to(device).requires_grad_(False)
    fn = lambda p, x: score(F.linear(module(F.linear(x, p["below"]))[0], p["above"]))  # noqa: E731
    params = {"below": normal(3, 3).to(device), "above": normal(2, 8).to(device)}
    assert_agrees(Problem(fn, (params, normal(3, 5, 1, 3).to(device))))


@each_cell
def test_a_frozen_cell_passes_the_gradient_on(kind, device):
    module = CELLS[kind](3, 4).to(device).requires_grad_(False)
    fn = lambda p, x: score(listed(module(F.linear(x, p)))[0])  # noqa: E731
    assert_agrees(Problem(fn, (normal(3, 3).to(device), normal(3, 2, 3).to(device))))


@each_layer
def test_weights_that_every_sample_computes_for_itself(kind, device):
    # A hypernetwork: no rule fits, and the recurrence is written out.
    module = LAYERS[kind](3, 4, num_layers=2, bidirectional=True).to(device)
    fn = lambda p, x: score(functional_call(module, {k: v * x.mean() for k, v in p.items()}, (x,))[0])  # noqa: E731
    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 1, 3).to(device))))


@each_cell
def test_cell_weights_that_every_sample_computes_for_itself(kind, device):
    module = CELLS[kind](3, 4).to(device)
    fn = lambda p, x: score(listed(functional_call(module, {k: v * x.mean() for k, v in p.items()}, (x,)))[0])  # noqa: E731
    assert_agrees(Problem(fn, (parameters(module), normal(3, 2, 3).to(device))))


def test_a_projection_that_every_sample_computes_for_itself(device):
    module = nn.LSTM(3, 4, proj_size=2).to(device)
    fn = lambda p, x: score(functional_call(module, p | {"weight_hr_l0": p["weight_hr_l0"] * x.mean()}, (x,))[0])  # noqa: E731
    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 1, 3).to(device))))


@each_layer
def test_derived_weights(kind, device):
    module = LAYERS[kind](3, 4).to(device)
    fn = lambda p, x: score(functional_call(module, {k: v.tanh() if "hh" in k else 2 * v for k, v in p.items()}, (x,))[0])  # noqa: E731
    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 1, 3).to(device))))


@each_layer
def test_tied_directions(kind, device):
    module = LAYERS[kind](3, 4, bidirectional=True).to(device)
    params = {name: p for name, p in parameters(module).items() if "reverse" not in name}
    fn = lambda p, x: score(functional_call(module, p | {f"{k}_reverse": v for k, v in p.items()}, (x,))[0])  # noqa: E731
    assert_agrees(Problem(fn, (params, normal(3, 5, 1, 3).to(device))))


def test_a_sequence_of_parameters(device):
    # A learned prompt: nothing that the layer reads depends on the sample.
    module = nn.LSTM(3, 4).to(device)
    fn = lambda p, x: score(functional_call(module, p["layer"], (p["prompt"],))[0] * x)  # noqa: E731
    assert_agrees(Problem(fn, ({"layer": parameters(module), "prompt": normal(5, 1, 3).to(device)}, normal(3, 4).to(device))))


# --- randomness ---------------------------------------------------------------------------------------------


def dropping(kind, device):
    module = LAYERS[kind](3, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=True).to(device)
    return lambda p, x: score(functional_call(module, p, (x,))[0]), parameters(module)


@each_layer
def test_one_dropout_for_all_samples_is_that_of_the_loop(kind, device):
    # The same state of the generator gives torch's own layer and the rule the same masks.
    if device.type != "cpu":
        pytest.skip("the fused kernel of the layer's dropout draws other numbers")
    fn, params = dropping(kind, device)
    x = normal(3, 2, 5, 3).to(device)

    def grads(method):
        torch.manual_seed(1)
        return psg.per_sample_grad(fn, randomness="same", method=method)(params, x)

    assert_trees_close(grads("capture"), grads("loop"))


@each_layer
def test_dropout_differs_between_samples(kind, device):
    fn, params = dropping(kind, device)
    x = normal(1, 1, 5, 3).to(device).expand(4, 1, 5, 3)
    out = psg.clipped_grad(fn, 1.0, method="capture")(params, x)
    assert len(out.norms.unique()) == 4
    assert len(psg.per_sample_norm(fn, randomness="same", method="capture")(params, x).unique()) == 1


@each_layer
def test_dropout_is_refused_where_randomness_is(kind, device):
    fn, params = dropping(kind, device)
    with pytest.raises(RuntimeError, match="random"):
        psg.per_sample_grad(fn, randomness="error")(params, normal(3, 2, 5, 3).to(device))


# --- dtypes -------------------------------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_in_low_precision(kind, dtype, device):
    module = LAYERS[kind](3, 4, num_layers=2).to(device, dtype)

    def fn(p, x):
        output, last = functional_call(module, p, (x,))
        assert {output.dtype, *(state.dtype for state in listed(last))} == {dtype}
        return output.square().mean()

    params, x = parameters(module), normal(3, 5, 1, 3).to(device, dtype)
    if kind == "relu":  # away from the kink, whose side rounding decides
        params, x = tree_map(torch.abs, (params, x))
    grads = psg.per_sample_grad(fn, method="capture")(params, x)
    assert_trees_close(grads, loop_grad(fn)(params, x))


@pytest.mark.parametrize("derivative", [torch.sqrt, torch.log])
@pytest.mark.parametrize("cell", [False, True])
def test_a_unit_that_is_off_takes_no_infinite_cotangent(cell, derivative, device):
    module = (CELLS["relu"](3, 4) if cell else LAYERS["relu"](3, 4)).to(device, torch.float64)

    def fn(p, x):
        h = functional_call(module, p, (x,))
        h = h if cell else h[0]
        return torch.where(h > 0, derivative(h), 0.0).sum()

    params, x = parameters(module), (normal(5, 3) if cell else normal(5, 4, 3)).to(device, torch.float64)
    grads = psg.per_sample_grad(fn, method="capture")(params, x)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert_trees_close(grads, loop_grad(fn)(params, x))


@pytest.mark.parametrize("kind", [*LAYERS, "cell tanh", "cell relu", "cell gru", "cell lstm"])
def test_autocast(kind, device):
    if kind == "lstm" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch itself cannot run an LSTM under autocast here: oneDNN has none in bfloat16 for this processor")
    module = (LAYERS[kind](3, 4) if kind in LAYERS else CELLS[kind.removeprefix("cell ")](3, 4)).to(device, torch.float32)
    dtypes = {}

    def fn(p, x, seen):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = functional_call(module, p, (F.linear(x, p["weight_ih" if "cell" in kind else "weight_ih_l0"][:3]).float(),))
        results = [*listed(output)] if "cell" in kind else [output[0], *listed(output[1])]
        dtypes[seen] = [result.dtype for result in results]
        return sum(score(result.float()) for result in results)

    params, x = parameters(module), normal(3, 5, 3).to(device, torch.float32)
    if "relu" in kind:  # away from the kink, whose side rounding decides
        params, x = tree_map(torch.abs, (params, x))
    x = x if "cell" in kind else x[:, :, None]
    values, grads = psg.per_sample_value_and_grad(fn, method="capture")(params, x, "capture")
    expected_values, expected = loop_value_and_grad(fn)(params, x, "loop")
    rtol = psg.testing.default_rtol(torch.bfloat16)
    assert_trees_close(values, expected_values, rtol=rtol, name="values")
    assert_trees_close(grads, expected, rtol=rtol, name="grads")
    assert dtypes["capture"] == dtypes["loop"]


# --- memory that changes ------------------------------------------------------------------------------------


@each_layer
def test_outputs_may_be_written_into(kind, device):
    # In double precision: in single, oneDNN's LSTM saves its output, and torch refuses in the loop.
    module = LAYERS[kind](3, 4, batch_first=True).to(device, torch.float64)

    def fn(p, x):
        output, last = functional_call(module, p, (x[None],))
        output[:, 1:] *= 2
        output.relu_()
        for state in listed(last):
            state.mul_(2)
        return score(output) + sum(score(state) for state in listed(last))

    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 3).to(device, torch.float64))))


@pytest.mark.parametrize("kind", ["gru", "lstm"])  # torch saves the new states of the other kinds, and raises
def test_new_states_may_be_written_into(kind, device):
    module = CELLS[kind](3, 3).to(device)

    def fn(p, x, write=True):
        states = listed(functional_call(module, p, (x,)))
        states = [part.mul_(2) if write else 2 * part for part in states]
        return sum(score(part) for part in states)

    args = parameters(module), normal(3, 2, 3).to(device)
    if device.type == "cpu":
        assert_agrees(Problem(fn, args))
    else:  # torch saves the new states of an LSTM there: its loop does not write
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args, write=False))


@each_layer
def test_an_input_written_into_afterwards_is_found_out(kind, device):
    module = LAYERS[kind](3, 4).to(device)

    def fn(p, x):
        x = F.linear(x, p["below"]).clone()
        output, _ = functional_call(module, p["layer"], (x,))
        with torch.no_grad():
            x.zero_()
        return score(output)

    params = {"below": normal(3, 3).to(device), "layer": parameters(module)}
    with pytest.raises(psg.PsgError, match="changed in place"):
        psg.per_sample_grad(fn, method="capture")(params, normal(3, 5, 1, 3).to(device))
    with pytest.raises(RuntimeError, match="inplace"):  # torch refuses this too
        psg.per_sample_grad(fn)(params, normal(3, 5, 1, 3).to(device))


def test_a_frozen_weight_written_into_afterwards_is_found_out(device):
    module = nn.RNN(3, 4).to(device)
    params = parameters(module)
    frozen = params.pop("weight_hh_l0")

    def fn(p, x):
        weight = frozen.clone()
        output, _ = functional_call(module, p | {"weight_hh_l0": weight}, (x,))
        weight.mul_(2)
        return score(output)

    with pytest.raises(psg.PsgError, match="changed in place"):
        psg.per_sample_grad(fn, method="capture")(params, normal(3, 5, 1, 3).to(device))
    with pytest.raises(RuntimeError, match="inplace"):
        psg.per_sample_grad(fn)(params, normal(3, 5, 1, 3).to(device))


def test_backward_asked_for_again(device):
    # The builders and the graph share one backward pass; for cotangents other than the last ones, a new one runs.
    layer = psg.rules.registered()[torch.lstm].run
    weights = [normal(16, 3).to(device), normal(16, 4).to(device), normal(16).to(device), normal(16).to(device)]
    x, state = normal(2, 1, 5, 3).to(device).requires_grad_(), [torch.zeros(2, 1, 1, 4, device=device)] * 2
    outputs, builders = layer(x, state, weights, True, 1, 0.0, True, False, True)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    expected = torch.lstm(x[:, 0], [part[:, 0].transpose(0, 1) for part in state], leaves, True, 1, 0.0, True, False, True)[0]
    first, second = torch.randn_like(outputs[0]), torch.randn_like(outputs[0])
    zeros = [torch.zeros_like(part) for part in outputs[1:]]
    for cotangent, asked in [(first, first), (second, first), (second, second)]:
        (into_x,) = torch.autograd.grad(outputs[0], x, cotangent, retain_graph=True)
        into_x_expected, *_ = torch.autograd.grad(expected, [x, *leaves], cotangent[:, 0], retain_graph=True)
        assert_trees_close(into_x, into_x_expected)
        own = torch.autograd.grad(expected, leaves, asked[:, 0], retain_graph=True)
        with torch.no_grad():
            summed = [build((asked, *zeros)).materialize().sum(0) for build in builders["params"]]
        assert_trees_close(summed, list(own), per_sample=False)


@each_layer
def test_without_grad(kind, device):
    module = LAYERS[kind](3, 3, num_layers=2).to(device)

    def fn(p, x):
        with torch.no_grad():
            target, _ = functional_call(module, p, (x,))
        return score(functional_call(module, p, (x,))[0] - target.flip(0))

    assert_agrees(Problem(fn, (parameters(module), normal(3, 5, 1, 3).to(device))))


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def like_a_gpu(device, monkeypatch):
    """Recurrent layers move weights that have changed into one chunk of memory, which they do for cuDNN alone."""

    def gather(weights, *options):
        for weight in weights:
            weight.set_(weight.clone())

    if device.type == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
        monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
        monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", gather)
        monkeypatch.setattr("torch.backends.cudnn.rnn.get_cudnn_mode", lambda mode: mode)


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
@each_layer
def test_weights_without_memory_are_not_gathered(kind, method, device, like_a_gpu):
    """torch asks them for their address, and a transform's wrappers have none."""
    module = LAYERS[kind](3, 4, batch_first=True).to(device)
    fn = lambda p, x: score(functional_call(module, p, (x[None],))[0])  # noqa: E731
    loss, params = psg.stateless(module, lambda output, y: score(output[0] - y))
    x, y = normal(3, 5, 3).to(device), normal(3, 4).to(device)
    for run, own in [(fn, (params, x)), (loss, (params, x, y))]:
        assert_trees_close(psg.per_sample_grad(run, method=method)(*own), loop_grad(run)(*own))


@each_layer
def test_parameters_stay_in_the_memory_of_the_module(kind, device, like_a_gpu):
    """Gathered, those that an optimizer updates would no longer be those that the loss is given."""
    module = LAYERS[kind](3, 4, batch_first=True).to(device)
    loss, params = psg.stateless(module, lambda output, y: score(output[0] - y))
    x, y = normal(3, 5, 3).to(device), normal(3, 4).to(device)
    for method in ("capture", "vmap", "loop"):
        psg.per_sample_grad(loss, method=method)(params, x, y)
        loss(params, x[0], y[0])
        module(x)
        assert {name: p.data_ptr() for name, p in module.named_parameters()} == {name: p.data_ptr() for name, p in params.items()}


def test_a_replacement_of_flatten_parameters_outlives_a_call(device, monkeypatch):
    """psg put back the method that it had found when it was imported."""
    own = lambda layer: None  # noqa: E731
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", own)
    psg.per_sample_grad(lambda p, x: (p * x).sum())(torch.ones(3, device=device), torch.ones(2, 3, device=device))
    assert nn.RNNBase.flatten_parameters is own


@each_layer
def test_the_loop_runs_without_cudnn(kind, device):
    """cuDNN differentiates once, in training mode, and has a dropout of its own."""
    module = LAYERS[kind](3, 4).to(device)
    enabled = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            enabled.add(torch.backends.cudnn.enabled)
            return func(*args, **(kwargs or {}))

    def fn(p, x):
        with Watch():
            output, _ = functional_call(module, p, (x,))
        return score(output)

    psg.per_sample_grad(fn, method="loop")(parameters(module), normal(2, 5, 1, 3).to(device))
    assert False in enabled and torch.backends.cudnn.enabled


# --- what the user sees -------------------------------------------------------------------------------------


@each_layer
def test_the_rules_give_outers_over_time(kind, device):
    module = LAYERS[kind](3, 4, bidirectional=True).to(device)
    fn = lambda p, x: score(functional_call(module, p, (x,))[0])  # noqa: E731
    factors = psg.factored_grad(fn)(parameters(module), normal(2, 5, 1, 3).to(device))
    for name, factor in factors.items():
        assert isinstance(factor, psg.factors.Outer if "weight" in name else psg.factors.Dense)
        assert not isinstance(factor, psg.factors.Outer) or factor.positions == 5


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's remark on the list of parameters that its modules keep
@each_layer
def test_exported_programs(kind, device):
    module = LAYERS[kind](3, 4, num_layers=2, batch_first=True).eval()
    program = move_to_device_pass(torch.export.export(module, (normal(1, 5, 3),)), device)  # the initial states are made there, too
    loss, params = psg.stateless(program.module(), lambda out, y: score(out[0] - y))
    assert_agrees(Problem(loss, (params, normal(3, 5, 3).to(device), normal(3, 4).to(device))))


def test_scripted_layers_take_the_loop(device):
    plain = Classifier("gru").to(device)
    loss, params = psg.stateless(torch.jit.script(plain), F.cross_entropy)
    args = {name: value + 1 for name, value in params.items()}, ids(11, 3, 7).to(device), ids(3, 3).to(device)
    assert_agrees(Problem(loss, args), may_fall="torch's interpreter calls the op")
    # The scripted layer reads its weights from a list that it stores; the given parameters must get into it.
    expected = loop_grad(psg.stateless(plain, F.cross_entropy)[0])(*args)
    assert_trees_close(psg.per_sample_grad(loss, method="loop")(*args), expected)


@each_layer
def test_no_steps_are_an_error_of_torch(kind, device):
    module = LAYERS[kind](3, 4).to(device)
    with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
        psg.per_sample_grad(lambda p, x: score(functional_call(module, p, (x,))[0]))(parameters(module), normal(3, 0, 1, 3).to(device))


def test_sizes_that_do_not_fit_are_an_error_of_torch(device):
    params = {"w_ih": normal(8, 3).to(device), "w_hh": normal(8, 3).to(device)}
    fn = lambda p, x: score(torch.lstm_cell(x, [x.new_zeros(1, 2)] * 2, p["w_ih"], p["w_hh"], None, None)[0])  # noqa: E731
    with pytest.raises(RuntimeError) as expected:
        loop_grad(fn)(params, normal(3, 1, 3).to(device))
    with pytest.raises(RuntimeError) as found:
        psg.per_sample_grad(fn)(params, normal(3, 1, 3).to(device))
    assert str(found.value) == str(expected.value)
