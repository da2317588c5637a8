"""From modules to functions: names, frozen and tied parameters, several inputs, keywords, target trees, scripted modules."""

import copy
import threading
import time
import types
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from functools import partial, wraps

import pytest
import torch
import torch.nn.functional as F
from cases import N, Tied, convnet
from torch import nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint

import psg
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad


def ordinary(module, *batch, criterion):
    """The gradient of the summed loss, as training computes it."""
    module.zero_grad()
    *inputs, target = batch
    total = sum(criterion(module(*(x[i : i + 1] for x in inputs)), target[i : i + 1]) for i in range(len(target)))
    total.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def batch(device):
    return torch.randn(N, 1, 8, 8, device=device), torch.randint(5, (N,), device=device)


def test_params_are_the_detached_parameters_that_require_grad(device):
    module = convnet().to(device)
    module[0].weight.requires_grad_(False)
    _, params = psg.stateless(module, F.cross_entropy)
    live = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert list(params) == list(live) and "0.weight" not in params
    for name, p in params.items():
        assert not p.requires_grad
        assert p.data_ptr() == live[name].data_ptr()  # the memory is the module's


def test_loss_of_one_sample_is_the_criterion_on_a_batch_of_one(batch, device):
    module = convnet().to(device)
    loss, params = psg.stateless(module, F.cross_entropy)
    x, y = batch
    expected = F.cross_entropy(module(x[:1]), y[:1])
    assert_trees_close(loss(params, x[0], y[0]), expected, per_sample=False)


def test_gradients_sum_to_training_s(batch, device):
    module = convnet().to(device)
    loss, params = psg.stateless(module, F.cross_entropy)
    grads = psg.per_sample_grad(loss)(params, *batch)
    expected = ordinary(module, *batch, criterion=F.cross_entropy)
    assert_trees_close({name: leaf.sum(0) for name, leaf in grads.items()}, expected, per_sample=False)


def test_frozen_parameters_and_buffers_are_read_at_every_call(device):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device).eval()
    module[0].requires_grad_(False)
    loss, params = psg.stateless(module, F.cross_entropy)
    x, y = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    before = psg.per_sample_grad(loss)(params, x, y)
    with torch.no_grad():
        module[0].weight.mul_(2)
        module[1].running_mean.add_(1)
    after = psg.per_sample_grad(loss)(params, x, y)
    assert_trees_close(after, loop_grad(loss)(params, x, y))
    assert (before["2.weight"] - after["2.weight"]).abs().max() > 1e-3


class Momentum(nn.Module):
    """A teacher that follows its student in every forward pass, as in MoCo."""

    def __init__(self, update):
        super().__init__()
        self.student, self.teacher, self.update = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False), update

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.update(own, other)
        return F.mse_loss(self.student(x), self.teacher(x))


def assign_data(own, other):
    own.data = 0.9 * own.data + 0.1 * other.detach()


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("update", [lambda own, other: own.mul_(0.9), lambda own, other: own.data.mul_(0.9), assign_data])
def test_a_module_that_changes_a_frozen_parameter(update, method, device):
    """The gradient of one sample would depend on the samples before it."""
    module = Momentum(update).to(device)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loss, params = psg.stateless(module)
    with pytest.raises(psg.StateError, match=r"of teacher \(Linear\) changes its parameter 'teacher.weight', which is not differentiated"):
        psg.per_sample_norm(loss, method=method)(params, torch.randn(N, 3, device=device))
    with pytest.raises(psg.StateError, match="'student.weight'"):
        psg.per_sample_norm(psg.stateless(Momentum(lambda own, other: other.mul_(2)).to(device))[0], method=method)(
            {"student.bias": params["student.bias"]}, torch.randn(N, 3, device=device)
        )
    assert_trees_close(dict(module.state_dict()), before, per_sample=False)


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:There is a performance drop", "ignore:Please use quant_min")
def test_training_that_is_aware_of_quantisation(method):
    """The fused op of torch.ao writes its observer's buffers, and leaves their versions as they are."""
    ao = pytest.importorskip("torch.ao.quantization")
    module = nn.Sequential(ao.QuantStub(), nn.Linear(5, 3)).train()
    module.qconfig = ao.get_default_qat_qconfig("fbgemm")
    ao.prepare_qat(module, inplace=True)
    x = torch.randn(N, 5, dtype=torch.float32)
    module.float()(x)
    module[0].activation_post_process = ao.FusedMovingAvgObsFakeQuantize()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    with pytest.raises(psg.StateError, match=r"changes its buffer.*disable_observer"):
        psg.per_sample_grad(loss, method=method)(params, x)
    module.apply(ao.disable_observer)
    if method in ("auto", "loop"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", psg.FallbackWarning)
            assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), loop_grad(loss)(params, x))


def test_buffers_made_under_inference_mode(device):
    """Inference tensors have no version counter to compare, and autograd cannot save them."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.register_buffer("scale", torch.rand(4))

        def forward(self, x):
            return self.linear(x) * self.scale

    module = Scaled().to(device)
    loss, params = psg.stateless(module, F.mse_loss)
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    expected = psg.per_sample_grad(loss)(*args)
    with torch.inference_mode():
        module.scale = module.scale.clone()
    assert module.scale.is_inference()
    assert_trees_close(psg.per_sample_grad(loss)(*args), expected)
    with torch.inference_mode():
        assert_trees_close(psg.per_sample_grad(loss)(*args), expected)
    assert module.scale.is_inference()


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_frozen_parameters_made_under_inference_mode(method, device):
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    own = dict(module[0].requires_grad_(False).named_parameters())
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    usual, all_params = psg.stateless(copy.deepcopy(module).requires_grad_(), F.mse_loss)
    expected = loop_grad(usual)({name: p.clone() for name, p in all_params.items()}, x, y)
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x, y), {name: expected[name] for name in params})
    assert all(getattr(module[0], name) is p and p.is_inference() for name, p in own.items())


def test_a_tied_parameter_appears_once(device):
    module = Tied().to(device)
    tokens, target = torch.randint(11, (N, 6), device=device), torch.randint(11, (N, 6), device=device)
    loss, params = psg.stateless(module, lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    assert "embed.weight" in params and "head.weight" not in params
    grads = psg.per_sample_grad(loss)(params, tokens, target)
    assert_trees_close(grads, loop_grad(loss)(params, tokens, target))
    expected = ordinary(module, tokens, target, criterion=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    assert_trees_close({name: leaf.sum(0) for name, leaf in grads.items()}, expected, per_sample=False)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, y, scale=None):
        out = self.left(x) + self.right(y)
        return out if scale is None else out * scale


def test_several_inputs(device):
    loss, params = psg.stateless(TwoInputs().to(device), F.mse_loss)
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 2, device=device), torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(*args), loop_grad(loss)(*args))


def test_a_dict_is_spread_as_keywords(device):
    loss, params = psg.stateless(TwoInputs().to(device), F.mse_loss)
    x, y, scale = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device), torch.randn(N, 4, device=device)
    target = torch.randn(N, 4, device=device)
    grads = psg.per_sample_grad(loss)(params, {"x": x, "y": y, "scale": scale}, target)
    mixed = psg.per_sample_grad(loss)(params, x, {"y": y, "scale": scale}, target)
    assert_trees_close(mixed, grads)
    assert_trees_close(grads, loop_grad(lambda p, x, y, s, t: loss(p, x, {"y": y, "scale": s}, t))(params, x, y, scale, target))


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.LSTM(4, 4), lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)],
    ids=["recurrent", "transformer"],
)
def test_sequences_whose_batch_dimension_is_the_second(layer, device):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer(), nn.Linear(4, 3)

        def forward(self, x):
            out = self.layer(x)
            return self.head(out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    def criterion(logits, labels):
        assert logits.shape == (5, 3)
        return F.cross_entropy(logits, labels.flatten())

    module = Tagger().to(device)
    x, labels = torch.randn(5, N, 4, device=device), torch.randint(3, (5, N), device=device)
    loss, params = psg.stateless(module, criterion, batch_dim=1)

    def own(params, x, labels):
        return F.cross_entropy(functional_call(module, params, (x[:, None],)), labels)

    grads = psg.per_sample_grad(loss, in_dims=(None, 1, 1))(params, x, labels)
    assert_trees_close(grads, loop_grad(own, in_dims=(None, 1, 1))(params, x, labels))


def test_a_sample_that_is_a_batch_enters_as_it_is(device):
    """A sample may be all the rows of a user: its gradient is that of their mean loss."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).to(device)
    x, y = torch.randn(N, 4, 1, 4, 4, device=device), torch.randint(3, (N, 4), device=device)
    loss, params = psg.stateless(module, F.cross_entropy, batch_dim=None)
    grads = psg.per_sample_grad(loss)(params, x, y)
    for i in range(N):
        expected = ordinary(module, x[i], y[i], criterion=lambda out, y: len(y) * F.cross_entropy(out, y))
        assert_trees_close({name: 4 * leaf[i] for name, leaf in grads.items()}, expected, per_sample=False)


@pytest.mark.parametrize("dim", [-1, True, 1.0, "first"])
def test_a_batch_dimension_that_is_none_is_an_error(dim):
    with pytest.raises(psg.InputError, match="batch_dim=.* expected an integer of at least 0"):
        psg.stateless(nn.Linear(3, 4), F.mse_loss, batch_dim=dim)


def test_what_is_given_by_keyword_reaches_the_module_as_it_is(device):
    module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).to(device)
    x, target, mask = torch.randn(N, 5, 4, device=device), torch.randn(N, 5, 4, device=device), torch.rand(5, 5, device=device) < 0.3
    mask.fill_diagonal_(False)
    loss, params = psg.stateless(module, F.mse_loss)
    grads = psg.per_sample_grad(loss)(params, x, target, src_mask=mask)

    def own(params, x, target):
        return F.mse_loss(functional_call(module, params, (x[None],), {"src_mask": mask})[0], target)

    assert_trees_close(grads, loop_grad(own)(params, x, target))
    assert_trees_close(loop_grad(loss)(params, x, target, src_mask=mask), grads)


Pair = namedtuple("Pair", "labels weights")


def test_targets_may_be_trees(device):
    def criterion(out, target):
        losses = F.cross_entropy(out, target.labels, reduction="none")
        return (losses * target.weights).sum()

    loss, params = psg.stateless(nn.Linear(3, 4).to(device), criterion)
    target = Pair(torch.randint(4, (N,), device=device), torch.rand(N, device=device))
    args = params, torch.randn(N, 3, device=device), target
    assert_trees_close(psg.per_sample_grad(loss)(*args), loop_grad(loss)(*args))


def test_a_dict_target_is_a_target(device):
    def criterion(out, target):
        return F.cross_entropy(out, target["labels"])

    loss, params = psg.stateless(nn.Linear(3, 4).to(device), criterion)
    args = params, torch.randn(N, 3, device=device), {"labels": torch.randint(4, (N,), device=device)}
    assert_trees_close(psg.per_sample_grad(loss)(*args), loop_grad(loss)(*args))


class OwnLoss(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(3, 4), wrap

    def forward(self, x, labels=None):
        return self.wrap(F.cross_entropy(self.linear(x), labels))


Output = namedtuple("Output", "loss")


@pytest.mark.parametrize("wrap", [lambda loss: loss, Output], ids=["the loss", ".loss"])
def test_without_a_criterion_the_module_gives_the_loss(wrap, device):
    loss, params = psg.stateless(OwnLoss(wrap).to(device))
    x, labels = torch.randn(N, 3, device=device), torch.randint(4, (N,), device=device)
    grads = psg.per_sample_grad(loss)(params, {"x": x, "labels": labels})
    assert_trees_close(grads, psg.per_sample_grad(loss)(params, x, labels))
    expected = loop_grad(lambda p, x, y: F.cross_entropy(F.linear(x, p["linear.weight"], p["linear.bias"]), y))(params, x, labels)
    assert_trees_close(grads, expected)


def test_an_output_without_a_loss_is_an_error(device):
    loss, params = psg.stateless(OwnLoss(lambda loss: {"value": loss}).to(device))
    with pytest.raises(psg.InputError, match=r"without a criterion.*\.loss; got dict"):
        loss(params, torch.randn(3, device=device), torch.tensor(1, device=device))
    loss, params = psg.stateless(nn.Linear(3, 4).to(device))
    with pytest.raises(psg.InputError, match=r"without a criterion.*; got a tensor of shape \(1, 4\)"):
        loss(params, torch.randn(3, device=device))


def test_parameters_without_names_are_an_error(device):
    module = nn.Linear(3, 4).to(device)
    loss, _ = psg.stateless(module, F.mse_loss)
    with pytest.raises(psg.InputError, match=r"params is a list; expected a mapping from names .*leaves frozen ones out"):
        loss(list(module.parameters()), torch.randn(3, device=device), torch.randn(4, device=device))


def test_a_module_without_trainable_parameters_is_an_error():
    module = nn.Linear(3, 4).requires_grad_(False)
    with pytest.raises(psg.InputError, match=r"stateless\(Linear\): no parameter requires grad"):
        psg.stateless(module, F.mse_loss)
    with pytest.raises(psg.InputError, match=r"no parameter requires grad"):
        psg.stateless(nn.ReLU(), F.mse_loss)


def test_lazy_layers_are_run_first(device):
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    with pytest.raises(psg.InputError, match=r"stateless\(Sequential\): a lazy layer has no shape yet. Run the module on a batch once"):
        psg.stateless(module, F.mse_loss)
    with pytest.raises(psg.InputError, match="a lazy layer"):
        psg.stateless(nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False)).to(device), F.mse_loss)  # a buffer
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    module(x)
    loss, params = psg.stateless(module, F.mse_loss)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(loss)(params, x, y))


def test_a_missing_target_is_an_error(device):
    loss, params = psg.stateless(nn.Linear(3, 4).to(device), F.mse_loss)
    with pytest.raises(psg.InputError, match=r"loss\(params, \*inputs, target\)"):
        loss(params)


def test_arguments_that_are_no_tensors_pass_through(device):
    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x, activation):
            return getattr(self.linear(x), activation)()

    loss, params = psg.stateless(Flagged().to(device), F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    grads = psg.per_sample_grad(loss)(params, x, "tanh", y)
    expected = loop_grad(lambda p, x, y: F.mse_loss(F.linear(x, p["linear.weight"], p["linear.bias"]).tanh(), y))(params, x, y)
    assert_trees_close(grads, expected)


def test_the_mode_at_the_call_counts(device):
    module = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(device)
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 1, device=device)
    noisy = [psg.per_sample_norm(loss)(params, x, y) for _ in range(2)]
    assert not torch.equal(*noisy)
    module.eval()
    assert torch.equal(psg.per_sample_norm(loss)(params, x, y), psg.per_sample_norm(loss)(params, x, y))
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(loss)(params, x, y))


def test_the_module_is_left_as_it_was(batch, device):
    module = convnet().to(device)
    before = OrderedDict((key, value.clone()) for key, value in module.state_dict().items())
    live = dict(module.named_parameters())
    loss, params = psg.stateless(module, F.cross_entropy)
    psg.clipped_grad(loss, 1.0)(params, *batch)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p is live[name] and p.grad is None for name, p in module.named_parameters())


def test_lora(device):
    """Frozen base, trained update: the gradient of the factors, none of the base."""

    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 5).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(5, 2))

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T + F.linear(x, self.base.weight + self.b @ self.a)

    loss, params = psg.stateless(LoRA().to(device), F.mse_loss)
    assert set(params) == {"a", "b"}
    args = params, torch.randn(N, 3, 6, device=device), torch.randn(N, 3, 5, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(*args), loop_grad(loss)(*args))


def test_parametrised_modules(device):
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    loss, params = psg.stateless(module.to(device), F.mse_loss)
    assert "0.parametrizations.weight.original0" in params
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(*args), loop_grad(loss)(*args))


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_parametrised_modules_within_cached(method, device):
    """The cache is keyed by module, not by parameters: it could give weights of an earlier call, and zero gradients."""
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)).to(device)
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    doubled = {name: 2 * p for name, p in params.items()}
    expected, expected_doubled = loop_grad(loss)(params, x, y), loop_grad(loss)(doubled, x, y)
    with nn.utils.parametrize.cached():
        cached = module[0].weight
        assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x, y), expected)
        assert_trees_close(psg.per_sample_grad(loss, method=method)(doubled, x, y), expected_doubled)
        assert module[0].weight is cached
    assert module[0].weight is not module[0].weight


def test_threads_within_cached_take_locks_in_one_order(device):
    """A call waited for its turn of the cache while it held the module's lock, for which a trace waited that had the turn."""
    loss, params = psg.stateless(nn.Linear(3, 2).to(device), F.mse_loss)
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    norms, tracing, found = psg.per_sample_norm(loss), threading.Event(), []

    def slow(*args):
        tracing.set()
        time.sleep(0.2)
        return norms(*args)

    def wait(*args):
        tracing.wait(60)
        return norms(*args)

    works = [threading.Thread(target=lambda fn=fn: found.append(fn(*args)), daemon=True) for fn in (psg.jit(slow, backend="eager"), wait)]
    expected = norms(*args)
    with nn.utils.parametrize.cached():
        for work in works:
            work.start()
        for work in works:
            work.join(20)
    assert len(found) == 2
    for own in found:
        assert_trees_close(own, expected)


def test_cached_that_another_thread_leaves_during_a_call(device):
    """The call put the cache back as it had found it: on, for ever, with the values of parameters long since updated."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).to(device)
    inside, left = threading.Event(), threading.Event()

    def criterion(output, y):
        inside.set()
        left.wait(60)
        return F.mse_loss(output, y)

    loss, params = psg.stateless(module, criterion)
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    found = []
    thread = threading.Thread(target=lambda: found.append(psg.per_sample_grad(loss)(*args)))
    with nn.utils.parametrize.cached():
        thread.start()
        inside.wait(60)
    left.set()
    thread.join()
    assert nn.utils.parametrize._cache_enabled == 0 and nn.utils.parametrize._cache == {}
    assert_trees_close(found[0], loop_grad(loss)(*args))


def test_a_module_that_caches_its_weights_within_cached(device):
    """What the forward pass itself caches, it computes once: here a random weight."""

    class Drop(nn.Module):
        def forward(self, w):
            return w * torch.rand(w.shape, device=w.device)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", Drop())

        def forward(self, x):
            with nn.utils.parametrize.cached():
                return self.l(x) - self.l(x)

    loss, params = psg.stateless(Twice().to(device), lambda output: output.sum())
    with nn.utils.parametrize.cached():
        norms = psg.per_sample_norm(loss)(params, torch.randn(N, 3, device=device))
    assert (norms == 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")  # scripted modules stay in use, and psg takes them
@pytest.mark.parametrize("compile", ["script", "trace"])
@pytest.mark.parametrize("warm", [False, True])
def test_scripted_and_traced_modules(compile, warm, device):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    scripted = torch.jit.script(module) if compile == "script" else torch.jit.trace(module, torch.randn(1, 3, device=device))
    x, y = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    for _ in range(3 * warm):
        scripted(x).sum().backward()
    loss, params = psg.stateless(module, F.cross_entropy)
    scripted_loss, scripted_params = psg.stateless(scripted, F.cross_entropy)
    assert set(scripted_params) == set(params)
    assert_trees_close(psg.per_sample_grad(scripted_loss)(scripted_params, x, y), psg.per_sample_grad(loss)(params, x, y))
    # The slots of the module hold its own parameters again.
    assert_trees_close(scripted(x).detach(), module(x).detach())
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(scripted.parameters(), module.parameters(), strict=True))


class Widened(nn.Module):
    """A part that TorchScript optimises, once it has been trained, so that vmap inside of autograd gives it no history (torch 2.13)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cat([self.linear(x), x], 1) * 0.5


class Behind(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_that_was_trained_keeps_its_gradient(device):
    module = Behind(torch.jit.script(Widened())).to(device)
    x, y = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    for _ in range(3):
        module(x).sum().backward()
    loss, params = psg.stateless(module, F.cross_entropy)
    with pytest.warns(psg.FallbackWarning, match="fn calls forward, which is TorchScript"):
        found = psg.per_sample_grad(loss)(params, x, y)
    assert found["body.linear.weight"].any()
    assert_trees_close(found, loop_grad(loss)(params, x, y))
    assert psg.per_sample_grad(loss, method="vmap")(params, x, y).keys() == params.keys()


UNSEEN = """
def widened(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1).mul(0.5)

def largest(x: Tensor) -> Tensor:
    return x.amax(-1)

def largest_of_several(x: Tensor) -> Tensor:
    if x.size(-1) > 1:
        x = x.amax(-1)
    return x

def padded(x: Tensor) -> Tensor:
    return torch.embedding(x.view(-1, 2), torch.arange(2, device=x.device), 1)
"""


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
def test_functions_of_torchscript(device):
    """Of which there is no Python function: one whose ops vmap runs right, and some with an op that it gets wrong."""
    unit = torch.jit.CompilationUnit(UNSEEN)
    w, x = torch.randn(3, 4, device=device), torch.randn(N, 3, device=device).round()
    for _ in range(3):
        unit.widened((x @ w).requires_grad_()).sum().backward()
    for name, rung in (("widened", "vmap"), ("largest", "loop"), ("largest_of_several", "loop"), ("padded", "loop")):
        script = getattr(unit, name)

        def fn(w, x):
            return script(x @ w).sin().sum()  # noqa: B023

        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert psg.explain(fn)(w, x).rung == rung
    assert unit.widened(x).shape == (N, 6) and torch._C.ScriptFunction.__call__.__module__ != "psg._torch._scripts"


def softclamp(t: torch.Tensor, value: float = 2) -> torch.Tensor:
    return (t / value).tanh() * value


def softclamp_unless_negative(t: torch.Tensor, value: float = 2) -> torch.Tensor:
    return softclamp(t, value) if bool(t.sum() > 0) else t


def gated(t: torch.Tensor, sizes: list[int], scales: dict[str, float], *, also: torch.Tensor | None) -> torch.Tensor:
    sizes.append(1)  # TorchScript has a list of its own
    first, second, rest = t.split(sizes, -1)
    first = first * second.new_full([2], scales["first"]) + first * (7 // 2) + rest
    return torch.sigmoid(second) * first if also is None else torch.sigmoid(second) * first * also


def summed(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return b[0] * a[0], b[1] + b[0] * a[1]


def doubled(function):
    @wraps(function)
    def inner(t):
        return 2 * function(t)

    return inner


@doubled
def cube(t):
    return t**3


def through_a_decorated(t):
    return cube(t) + 1


def asking(t):
    if torch.jit.is_scripting():
        t = t * 2
    return t * 3


def integers(t: torch.Tensor, count: int) -> torch.Tensor:
    return t * (1.0 / float(count))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _softclamp, _gated, _branching = torch.jit.script(softclamp), torch.jit.script(gated), torch.jit.script(softclamp_unless_negative)
    _summed = torch.jit.script(summed)
    _traced = torch.jit.trace(softclamp_unless_negative, torch.ones(4))
    _cube, _through, _asking, _integers = map(torch.jit.script, (cube, through_a_decorated, asking, integers))

CALLS = {
    "an integer for a float": ("capture", lambda w, x: _softclamp(x @ w, value=3)),
    "a default": ("capture", lambda w, x: _softclamp(x @ w)),
    "containers": ("capture", lambda w, x: _gated(torch.cat([x @ w, x[:1]]), (2, 2), {"first": 2}, also=x[0])),
    "lists for tuples": ("capture", lambda w, x: torch.cat(_summed([x @ w, x @ w.sin()], (w.sum(0), x @ w)))),
    "a branch on the data": ("capture", lambda w, x: _branching(x @ w)),
    "a traced function": ("vmap", lambda w, x: _traced(x @ w)),  # which has recorded the branch of a positive sum
    "a tensor for a float": ("loop", lambda w, x: _softclamp(x, w[0, 0]) @ w),  # which TorchScript detaches
    "a decorator that TorchScript leaves out": ("vmap", lambda w, x: _cube(x @ w)),
    "one of a function that it calls": ("vmap", lambda w, x: _through(x @ w)),
    "a question for TorchScript": ("vmap", lambda w, x: _asking(x @ w)),
    "an error of Python's": ("vmap", lambda w, x: _integers(x @ w, 0)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning", "ignore:Converting a tensor")
@pytest.mark.parametrize("call", CALLS)
def test_functions_of_torchscript_run_as_python_where_that_is_the_same(call, device):
    rung, run = CALLS[call]

    def fn(w, x):
        return run(w, x).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(N, 3, device=device)
    for n in (0, 1, N):
        values, grads = psg.per_sample_value_and_grad(fn)(w, x[:n])
        expected = loop_value_and_grad(fn)(w, x[:n])
        assert_trees_close(values.nan_to_num(), expected[0].nan_to_num())
        assert_trees_close(grads.nan_to_num(), expected[1].nan_to_num())
    assert psg.explain(fn)(w, x).rung == rung


BATCHES = {
    "of parameters": lambda w, x: x @ _softclamp(w),
    "of parameters and data": lambda w, x: _softclamp(_summed((w[0], w[1]), (x @ w, x @ w))[1] @ w.T, 3),
    "in a checkpoint": lambda w, x: checkpoint(lambda x: (x @ _softclamp(w)).sin(), x, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("call", BATCHES)
def test_functions_of_torchscript_in_a_whole_batch(call, device):
    def fn(w, x):
        return BATCHES[call](w, x).sin().sum(1)

    w, x = torch.randn(3, 4, device=device), torch.randn(N, 3, device=device)
    for n in (0, 1, N):
        found = psg.per_sample_value_and_grad(fn, method="batch")(w, x[:n])
        assert_trees_close(found, loop_value_and_grad(lambda w, x: fn(w, x[None])[0])(w, x[:n]))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
def test_a_scripted_function_with_a_variable_that_python_has_no_more(device):
    """Reading its variables raised ValueError."""
    clamp = softclamp

    def outer(t):
        return clamp(t) + 1

    script = torch.jit.script(outer)
    del outer.__closure__[0].cell_contents

    def fn(w, x):
        return script(x @ w).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(N, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    assert "TorchScript" in str(psg.explain(fn)(w, x).reasons)
    with pytest.raises(psg.PsgError, match="use the function before scripting"):
        torch.func.jacrev(lambda w: psg.per_sample_norm(fn)(w, x))(w)


def tripled(t: torch.Tensor) -> torch.Tensor:
    return 3 * t


def bound(t: torch.Tensor) -> torch.Tensor:
    return names.act(t)


def through_bound(t: torch.Tensor) -> torch.Tensor:
    return bound(t) + 1


def bound_in_turn(t: torch.Tensor) -> torch.Tensor:
    return names.act(names.also(t))


def bound_in_a_list(t: torch.Tensor) -> torch.Tensor:
    return [names.act(own) for own in [t, 2 * t]][1]


def bound_number(t: torch.Tensor) -> torch.Tensor:
    return (names.number * t).tanh()


def bound_later(t: torch.Tensor) -> torch.Tensor:
    return globally_bound(t)


names, former = types.ModuleType("names"), {"act": softclamp, "also": tripled, "number": 2.0}
globally_bound = softclamp


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "called, now",
    [
        (bound, {"act": tripled}),
        (bound, {"act": torch.sin}),
        (through_bound, {"act": tripled}),
        (bound_in_turn, {"act": tripled, "also": softclamp}),
        (bound_in_a_list, {"act": tripled}),
        (bound_number, {"number": 3.0}),
        (bound_later, {}),
    ],
    ids=["a function", "an op", "inside", "exchanged", "in a list", "a number", "a global"],
)
def test_names_that_stand_for_something_else_than_when_a_function_was_scripted(called, now, device, monkeypatch):
    """TorchScript keeps what they stood for, and Python takes what they stand for now."""
    vars(names).update(former)
    script = torch.jit.script(called)

    def fn(w, x):
        return script(x @ w).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(N, 3, device=device)
    for bound_now, rung in (({}, "capture"), (now, "vmap"), ({}, "capture")):
        vars(names).update(former | bound_now)
        if not now:
            monkeypatch.setitem(globals(), "globally_bound", tripled if rung == "vmap" else softclamp)
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert psg.explain(fn)(w, x).rung == rung


SCRIPTED = [
    *(f"torch.{op}(a)" for op in "sin cos tan asin acos atan sinh cosh asinh atanh log1p log2 log10 expm1 exp2 erf reciprocal".split()),
    *(f"torch.{op}(a)" for op in "floor ceil round trunc sign".split()),
    *("torch.acosh(a + 1)", "torch.atan2(a, b)", "torch.hypot(a, b)", "torch.lerp(a, b, 0.3)", "torch.lerp(a, b, c)"),
    *("torch.addcmul(a, b, c, value=2.0)", "torch.addcdiv(a, b, c)", "torch.where(a > b, a, c)", "torch.clamp(a, b, c)"),
    *("torch.clamp(a, 0.4, 0.7)", "torch.clamp_min(a, 0.5)", "torch.clamp_max(a, 0.5)", "torch.maximum(a, b)", "torch.minimum(a, b)"),
    *("a.norm() * c", "torch.norm(a, 2, [0], True) * c", "a.norm(p=1) * b"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("expression", SCRIPTED)
def test_ops_in_torchscript_under_vmap(expression, device):
    script = torch.jit.CompilationUnit(f"def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:\n    return {expression}\n").run
    w, x = torch.rand(3, 5, device=device), torch.rand(N, 3, device=device)

    def fn(w, x):
        output = script(0.9 * torch.sigmoid(x @ w), torch.sigmoid(w[0] * x.sum()), w[1].exp())
        return (output * torch.arange(5.0, device=x.device)).sum()

    for _ in range(3):  # it is specialised in the first calls
        assert_trees_close(psg.per_sample_grad(fn, method="vmap")(w, x), loop_grad(fn)(w, x), atol=1e-12)
    found = torch.func.jacrev(lambda w: psg.per_sample_grad(fn, method="vmap")(w, x).sum(0))(w)
    exact = torch.autograd.functional.hessian(lambda w: torch.stack([fn(w, own) for own in x]).sum(), w)
    assert_trees_close(found, exact, atol=1e-10, per_sample=False)


def _decoder():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 8, padding_idx=0), nn.Parameter(torch.randn(1, 5, 8))
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids):
            hidden = self.block(self.tokens(ids) + self.positions)
            return self.head(torch.cat([hidden.mean(1)[:, :4], hidden.amax(1)[:, 4:]], 1))

    return Decoder()


def _network():
    return nn.Sequential(
        nn.Embedding(9, 8), nn.Conv1d(5, 4, 3, padding=1, groups=1), nn.PReLU(4), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 2, 2, 2),
        nn.BatchNorm1d(2), nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 3)),
    ).eval()  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:The .grad attribute", "ignore:.*isinstance")
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("build", [_decoder, _network])
def test_exported_programs_run_by_rules(build, decomposed):
    """ATen's ops, also as run_decompositions writes them, run as the functions of torch that they are."""
    module = build().double()
    ids, y = torch.randint(9, (N, 5)), torch.randint(3, (N,))
    program = torch.export.export(module, (ids,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    exported = (program.run_decompositions() if decomposed else program).module()
    loss, params = psg.stateless(exported, F.cross_entropy)
    original, own = psg.stateless(module, F.cross_entropy)
    assert set(params) == set(own)
    assert_trees_close(psg.per_sample_grad(loss)(params, ids, y), loop_grad(original)(own, ids, y))
    # A decomposed product of the tokens with in_proj expands the weight to all of them.
    found, expected = (
        {leaf.path: leaf.kind for leaf in psg.explain(fn)(p, ids, y).leaves if not (decomposed and "in_proj" in leaf.path)}
        for fn, p in ((loss, params), (original, own))
    )
    assert found == expected


class Shift(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", torch.full((4,), by))

    def forward(self, x):
        return x.tanh() + self.by


def test_submodules_are_read_at_every_call(device):
    """An exchanged submodule brings its own buffers, parameters and mode; once it got the buffers of its predecessor."""
    module = nn.Sequential(nn.Linear(3, 4), Shift(1.0), nn.Linear(4, 4)).to(device)
    module[2].weight = nn.Parameter(torch.randn(4, 4, device=device))
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    module[1] = Shift(10.0).to(device)
    own = psg.stateless(module, F.mse_loss)[0]
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(own)(params, x, y))
    module[1] = nn.BatchNorm1d(4).to(device)
    with pytest.raises(psg.StateError, match=r"1 \(BatchNorm1d\) is in training mode"):
        psg.per_sample_norm(loss)(params, x, y)
    module[1] = nn.Linear(4, 4).to(device).requires_grad_(False)
    own = psg.stateless(module, F.mse_loss)[0]
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(own)(params, x, y))


def test_ties_are_read_at_every_call(device):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    module[2].weight = module[0].weight
    loss, params = psg.stateless(module, F.mse_loss)
    module[2] = nn.Linear(4, 4).to(device).requires_grad_(False)  # no longer tied
    own, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 4, device=device), torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(own)(params, x, y))


def test_a_submodule_with_two_names_keeps_its_parameters(device):
    """Its parameter was once swapped under both names, and then restored to what the second swap had found."""
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.Tanh(), layer).to(device)
    own = layer.weight
    loss, params = psg.stateless(module, F.mse_loss)
    args = params, torch.randn(N, 4, device=device), torch.randn(N, 4, device=device)
    grads = psg.per_sample_grad(loss)(*args)
    assert layer.weight is own
    assert_trees_close(grads, loop_grad(loss)(*args))
    expected = ordinary(module, *args[1:], criterion=F.mse_loss)
    assert_trees_close({name: leaf.sum(0) for name, leaf in grads.items()}, expected, per_sample=False)


@pytest.mark.parametrize("name", ["nope", "0.nope", "nope.weight", "1.by"])
def test_a_name_of_no_parameter_is_an_error(name, device):
    module = nn.Sequential(nn.Linear(3, 4), Shift(1.0)).to(device)
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    with pytest.raises(psg.InputError, match=rf"params has '{name}', which is no parameter of Sequential"):
        psg.per_sample_grad(loss)({**params, name: torch.zeros(4, device=device)}, x, y)


@pytest.mark.parametrize("shared", [False, True], ids=["a tied tensor", "a submodule with two names"])
def test_a_second_name_is_an_error(shared, device):
    """A second name would break the tie."""
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.Tanh(), layer if shared else nn.Linear(4, 4)).to(device)
    module[2].weight = layer.weight
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 4, device=device), torch.randn(N, 4, device=device)
    with pytest.raises(psg.InputError, match=r"params has '2.weight', which is tied to '0.weight'"):
        psg.per_sample_grad(loss)({**params, "2.weight": params["0.weight"]}, x, y)


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_of_the_parameters(tied, device):
    """The other parameters are constants: no result has a history, and only the part's gradient costs anything."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    if tied:
        module[4].weight = module[2].weight
    loss, params = psg.stateless(module, F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    for name in params:
        part = {name: params[name]}
        values, grads = psg.per_sample_value_and_grad(loss)(part, x, y)
        assert not values.requires_grad and not grads[name].requires_grad
        assert_trees_close(grads[name], loop_grad(loss)(params, x, y)[name])
        factors = psg.factored_grad(loss)(part, x, y)
        assert type(factors[name]) is type(psg.factored_grad(loss)(params, x, y)[name])
        clipped = psg.clipped_grad(loss, clip_norm=0.1)
        assert_trees_close(psg.jit(clipped, backend="eager")(part, x, y).grads, clipped(part, x, y).grads)
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:.*which is TorchScript")
@pytest.mark.parametrize("scripted", [False, True])
def test_tied_constants_are_one(scripted, device):
    """A penalty counts tied constants once, whichever part of the parameters is passed."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device)
    module[1].weight = module[0].weight
    module = torch.jit.script(module) if scripted else module

    def criterion(output, y):
        return F.mse_loss(output, y) * sum(parameter.square().sum() for parameter in module.parameters())

    loss, params = psg.stateless(module, criterion)
    x, y = torch.randn(N, 2, device=device), torch.randn(N, 2, device=device)
    expected = loop_value_and_grad(loss)(params, x, y)
    for method in ("auto", "loop"):
        values, grads = psg.per_sample_value_and_grad(loss, method=method)({"1.bias": params["1.bias"]}, x, y)
        assert_trees_close((values, grads["1.bias"]), (expected[0], expected[1]["1.bias"]))


def test_a_later_parametrization_is_an_error(device):
    """The weight becomes a property, and setting it would write into the module's own parameter."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(device)
    loss, params = psg.stateless(module, F.mse_loss)

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

        def right_inverse(self, weight):
            return weight

    nn.utils.parametrize.register_parametrization(module[0], "weight", Symmetric())
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    before = module[0].parametrizations.weight.original.detach().clone()
    with pytest.raises(psg.InputError, match=r"'0.weight', which is no parameter.*call stateless again"):
        psg.per_sample_grad(loss)(params, x, y)
    assert torch.equal(module[0].parametrizations.weight.original, before)
    loss, params = psg.stateless(module, F.mse_loss)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(loss)(params, x, y))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*which is TorchScript")
@pytest.mark.parametrize("scripted", [False, True])
def test_threads_take_turns_in_a_module(scripted, hasty_threads, device):
    """Threads once put their parameters into one module at the same time: wrong gradients, silently, and dead tensors left behind."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3)).to(device)
    module = torch.jit.script(module) if scripted else module
    own = [parameter.data_ptr() for parameter in module.parameters()]
    batches = [(torch.randn(N, 8, device=device), torch.randn(N, 3, device=device)) for _ in range(3)]
    losses = [psg.stateless(module, F.mse_loss) for _ in batches]
    expected = [psg.per_sample_norm(loss)(params, *batch) for (loss, params), batch in zip(losses, batches, strict=True)]
    found = [[] for _ in batches]

    def work(i):
        loss, params = losses[i]
        for _ in range(20):
            found[i].append(psg.per_sample_norm(loss)(params, *batches[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(expected):
        assert len(found[i]) == 20 and all(torch.equal(got, want) for got in found[i])
    assert [parameter.data_ptr() for parameter in module.parameters()] == own


@pytest.mark.parametrize("method", ["loop", "batch"])
def test_a_backward_pass_stays_in_the_thread_that_has_the_locks(method, device):
    """In a thread of an accelerator's own a checkpointed loss, called again, would wait for the module's lock for ever."""
    threaded = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):
            threaded.append(torch._C._is_multithreading_enabled())
            return cotangent

    class Net(nn.Linear):
        def forward(self, x):
            return Noting.apply(super().forward(x))

    loss, params = psg.stateless(Net(3, 2).to(device), lambda output, y: (output * y).sum(-1), batch_dim=None)
    args = params, torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    assert_trees_close(psg.per_sample_grad(loss, method=method)(*args), loop_grad(loss)(*args))
    assert threaded and not any(threaded) and torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("hold", [lambda w: [w], lambda w: {"w": w}, lambda w: (w,)], ids=["list", "dict", "tuple"])
def test_a_parameter_held_in_a_list_is_refused_where_it_is_used(hold, device):
    """`functional_call` does not swap such a parameter: its gradient would be lost."""

    class Tied(nn.Module):
        def __init__(self, uses):
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.uses, self.held = uses, hold(self.first.weight)

        def forward(self, x):
            tied = next(iter(self.held.values() if isinstance(self.held, dict) else self.held))
            assert tied.shape == (3, 3)
            return F.linear(self.first(x), tied) if self.uses else self.first(x)

    x = torch.randn(5, 3, device=device)
    for uses in (False, True):
        module = Tied(uses).to(device)
        loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
        if uses:
            with pytest.raises(psg.StateError, match="'first.weight' from a list"):
                psg.per_sample_grad(loss)(params, x, x)
        else:
            assert_trees_close(psg.per_sample_grad(loss)(params, x, x), loop_grad(loss)(params, x, x))


@pytest.mark.parametrize(
    "hold",
    [
        lambda w: lambda x: x @ w,
        lambda w: lambda x, w=w: x @ w,
        lambda w: partial(F.linear, weight=w),
        lambda w: partial(torch.matmul, other=w.T),
    ],
    ids=["closure", "default", "partial", "view"],
)
def test_a_parameter_held_by_a_function_is_refused_where_it_is_used(hold, device):
    module = nn.Linear(3, 3, bias=False).to(device)
    module.held = {"functions": [hold(module.weight)]}
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    module.register_forward_hook(lambda module, _, output: module.held["functions"][0](output))
    x = torch.randn(5, 3, device=device)
    with pytest.raises(psg.StateError, match="the module uses its parameter 'weight' from a list, function"):
        psg.per_sample_grad(loss)(params, x, x)


class Holder:
    """An object that psg knows nothing of."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("hold", [Holder, lambda w: Holder(w.T), lambda w: Holder(w[None])], ids=["itself", "transposed", "a view"])
def test_a_parameter_held_by_an_object_is_refused_where_it_is_used(hold, method, recorded, device):
    module = nn.Linear(3, 3, bias=False).to(device)
    hold = hold(module.weight)  # as a global, or in an attribute of an attribute
    module.register_forward_hook(lambda module, _, output: hold(output).sum(0))
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    x = torch.randn(5, 3, device=device)
    with (
        pytest.raises(psg.StateError, match="the module uses its parameter 'weight' from a list, function, object"),
        torch.set_grad_enabled(recorded),
    ):
        psg.per_sample_grad(loss, method=method)(params, x, x)


class OldStyle(torch.autograd.Function):
    """x @ w, in the old style."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return x @ w

    @staticmethod
    def backward(ctx, cotangent):
        w, x = ctx.saved_tensors
        return torch.outer(x.reshape(-1), cotangent.reshape(-1)), cotangent @ w.T


_bound = OldStyle.apply


@torch.jit.script
def _scripted(w, x):
    return x @ w


HANDED = {
    "vmap": lambda w, x: torch.func.vmap(lambda w, x: x @ w, (0, None))(w[None], x)[0],
    "vmap of the whole": lambda w, x: torch.func.vmap(torch.dot, (0, None))(w, x[0]) + x[0],
    "jacrev": lambda w, x: torch.func.jacrev(lambda w: (x @ w).square().sum())(w).sum(0),
    "vjp": lambda w, x: torch.func.vjp(lambda w: x @ w, w)[1](x)[0],
    "autograd.Function": _bound,
    "torch.jit": _scripted,
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("how", HANDED)
def test_a_parameter_held_elsewhere_is_refused_where_it_is_handed_on(how, method, recorded, device):
    """To a transform, an autograd.Function or a scripted function: no op of fn's shows the parameter itself, and its gradient was zero."""
    module = nn.Linear(3, 3, bias=False).to(device)
    held = Holder(module.weight)
    module.register_forward_hook(lambda module, _, output: HANDED[how](held.weight, output).sum(0))
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    x = torch.randn(5, 3, device=device)
    unable = how == "autograd.Function" and method in ("capture", "vmap") or how == "torch.jit" and method == "vmap"
    error = (psg.StateError, psg.PsgError, RuntimeError) if unable else psg.StateError
    with (
        pytest.raises(error, match=None if unable else "the module uses its parameter 'weight' from a list"),
        torch.set_grad_enabled(recorded),
    ):
        psg.per_sample_grad(loss, method=method)(params, x, x)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_criterion_that_holds_a_parameter_is_refused_where_a_transform_takes_it(method, device):
    module = nn.Linear(3, 3, bias=False).to(device)
    held = module.weight
    penalty = lambda w: torch.func.vmap(torch.Tensor.sum)(w).square().sum()  # noqa: E731
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum() + penalty(held))
    x = torch.randn(5, 3, device=device)
    with pytest.raises(psg.StateError, match="the criterion uses the module's parameter 'weight'"):
        psg.per_sample_grad(loss, method=method)(params, x, x)


def test_parameters_of_transforms_around_the_call_are_no_others(device):
    """The module's own parameters are what fn is given, by a transform's wrapper."""
    module = nn.Linear(3, 3, bias=False).to(device)
    loss, _ = psg.stateless(module, lambda output, y: (output * y).sum() + sum(p.square().sum() for p in module.parameters()))
    x = torch.randn(5, 3, device=device)

    def total(weight):
        return psg.per_sample_norm(loss, method="loop")({"weight": weight}, x, x).square().sum()

    own = module.weight.detach().clone()
    assert_trees_close(torch.func.grad(total)(module.weight).detach(), torch.func.grad(total)(own))


class Rescaled(nn.Module):
    """Divides a weight once, as transformers' RWKV does, and notes that in a flag."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.is_rescaled = nn.Linear(3, 3), nn.Linear(3, 1), False

    def forward(self, x):
        if not self.is_rescaled:
            with torch.no_grad():
                self.b.weight.div_(2)
            self.is_rescaled = True
        return (self.b(self.a(x).tanh()) ** 2).sum()


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_module_that_rescales_a_parameter_once_is_refused(method, device):
    """The second call had the flag, but not the weights: its gradients were wrong, and so was the module."""
    module, x = Rescaled().to(device), torch.randn(4, 3, device=device)
    loss, params = psg.stateless(module)
    for _ in range(2):
        with pytest.raises(psg.StateError, match="writes into the parameter 'b.weight' and changes 'is_rescaled' of the module"):
            psg.per_sample_grad(loss, method=method)(params, x)
        assert not module.is_rescaled
    module(x)
    loss, params = psg.stateless(module)
    psg.check(loss)(params, x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_module_that_masks_a_parameter_in_every_call_is_accepted(device):
    mask = torch.ones(3, 3, device=device).tril()

    class Masked(nn.Linear):
        def forward(self, x):
            self.weight.data.mul_(mask)
            return super().forward(x)

    loss, params = psg.stateless(Masked(3, 3).to(device), lambda output, y: (output * y).sum())
    x = torch.randn(4, 3, device=device)
    psg.check(loss)(params, x, x)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_parameters_are_parameters_to_isinstance(method, device):
    """peft's `transpose`, for example, detaches a parameter, and nothing else."""

    class Scaled(nn.Linear):
        def forward(self, x):
            weight = nn.Parameter(self.weight.T) if isinstance(self.weight, nn.Parameter) else self.weight.T
            return super().forward(x) / weight.norm()

    module, x = Scaled(3, 3).to(device), torch.randn(4, 3, device=device)
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    rows = [torch.autograd.grad((module(row[None]) * row).sum(), module.weight)[0] for row in x]
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x, x)["weight"], torch.stack(rows))
    assert not any(isinstance(param, nn.Parameter) for param in params.values())


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
def test_attributes_of_parameters_are_read(method, device):
    """As by models that keep the scale of a quantised weight, or its shape in a smaller model, with the weight."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * getattr(self.weight, "scale", 1.0), self.bias) * self.bias.scale

    module, x = Scaled(3, 2).to(device), torch.randn(4, 3, device=device)
    module.weight.scale, module.bias.scale = 3.0, torch.tensor(0.5, device=device)
    module.bias.requires_grad_(False)
    dims, batch_dim = (1, None) if method == "batch" else (None, 0)
    loss, params = psg.stateless(module, lambda output, y: output.square().sum(dims), batch_dim=batch_dim)
    rows = [torch.autograd.grad(module(row[None]).square().sum(), module.weight)[0] for row in x]
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x, x)["weight"], torch.stack(rows))
    assert [*params] == ["weight"] and not vars(params["weight"]) and vars(module.weight) == {"scale": 3.0}


class Computed(nn.Module):
    """A module with a value that was computed in `__init__`, from its parameter or from another tensor that requires grad."""

    def __init__(self, own):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.other = nn.Parameter(torch.randn(3)) if own else torch.randn(3, requires_grad=True)
        self.value = (self.other + 1).exp()

    def forward(self, x):
        return (x * self.weight * self.value).sum()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_a_value_computed_from_a_parameter_before_the_call_is_refused(method, recorded):
    x = torch.randn(5, 3)
    loss, params = psg.stateless(Computed(own=True))
    with pytest.raises(psg.StateError, match="computed from its parameter 'other' before the call"), torch.set_grad_enabled(recorded):
        psg.per_sample_grad(loss, method=method)(params, x)

    loss, params = psg.stateless(Computed(own=False))
    with torch.set_grad_enabled(recorded):
        assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), loop_grad(loss)(params, x))


def test_parameters_and_samples_computed_from_the_module_s_own_are_accepted(device):
    module = nn.Linear(3, 3).to(device)
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    stepped = {name: param - 0.1 * param.exp() for name, param in params.items()}
    x = torch.randn(5, 3, device=device) + module.weight.sum()

    def fn(params, x):
        return loss(params, x * 2, x)

    for method in ("auto", "capture", "vmap", "loop"):
        assert_trees_close(psg.per_sample_grad(fn, method=method)(stepped, x), loop_grad(fn)(stepped, x))


def test_a_parameter_s_own_shape_and_values_may_be_read_anywhere(device):
    module = nn.Linear(3, 3, bias=False).to(device)
    held, doubled = Holder(module.weight), 2 * module.weight

    def hook(module, _, output):
        scale = held.weight.detach().norm() + torch.ones_like(doubled).sum() + output[..., :1].expand_as(doubled).sum()
        return output * scale + torch.zeros_like(held.weight).sum() + output.new_ones(held.weight.shape).sum()

    module.register_forward_hook(hook)
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())
    x = torch.randn(5, 3, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, x), loop_grad(loss)(params, x, x))


def test_each_kind_of_module_has_its_own_warning(device):
    class First(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            output.register_hook(lambda cotangent: 2 * cotangent)
            return output

    class Second(First):
        pass

    x = torch.randn(2, 3, device=device)
    for kind in (First, Second):
        loss, params = psg.stateless(kind(3, 3).to(device), lambda output, y: (output * y).sum())
        with pytest.warns(psg.FallbackWarning):
            psg.per_sample_grad(loss)(params, x, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_part_of_a_recurrent_layer_s_parameters(kind, device):
    """torch also keeps these parameters in a list, and updates the list when they are swapped."""
    layer = kind(3, 4, batch_first=True).to(device)
    loss, params = psg.stateless(layer, lambda output, y: (output[0] * y).sum())
    part = {name: value for name, value in params.items() if "bias" in name}
    x, y = torch.randn(5, 2, 3, device=device), torch.randn(5, 2, 4, device=device)
    with torch.no_grad():
        found = psg.per_sample_grad(loss)(part, x, y)
    whole = loop_grad(loss)(params, x, y)
    assert_trees_close(found, {name: whole[name] for name in part})


def test_a_class_is_no_module():
    with pytest.raises(psg.InputError, match="expected a module, got the class Linear.*make an instance"):
        psg.stateless(nn.Linear)


def _expect_backward_s_gradients(module, criterion, x, y):
    loss, params = psg.stateless(module, criterion)
    for method in ("auto", "vmap", "loop"):
        found = psg.per_sample_grad(loss, method=method)(params, x, y)
        for i in range(N):
            module.zero_grad()
            criterion(module(x[i : i + 1]), y[i : i + 1]).backward()
            expected = {name: p.grad for name, p in module.named_parameters()}
            assert_trees_close({name: g[i] for name, g in found.items()}, expected, per_sample=False)


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))])
def test_a_criterion_that_reads_the_module_s_parameters(make, device):
    """A penalty in the criterion is a part of the loss, as it is for `backward()`."""
    module, x, y = make().to(device), torch.randn(N, 3, device=device), torch.randint(4, (N,), device=device)

    def criterion(out, target):
        return F.cross_entropy(out, target) + 0.1 * sum(p.square().sum() for p in module.parameters())

    _expect_backward_s_gradients(module, criterion, x, y)
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_a_criterion_that_has_kept_the_module_s_parameters_is_refused(device):
    module, x, y = nn.Linear(3, 4).to(device), torch.randn(N, 3, device=device), torch.randint(4, (N,), device=device)
    kept = list(module.parameters())

    def criterion(out, target):
        return F.cross_entropy(out, target) + 0.1 * kept[0].square().sum()

    loss, params = psg.stateless(module, criterion)
    with pytest.raises(psg.StateError, match="the criterion uses the module's parameter 'weight' by a reference of its own"):
        psg.per_sample_grad(loss)(params, x, y)
    start = [p.detach().clone() for p in kept]

    def near(out, target):
        return F.cross_entropy(out, target) + sum((p - p0).square().sum() for p, p0 in zip(module.parameters(), start, strict=True))

    loss, params = psg.stateless(module, near)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, y), loop_grad(loss)(params, x, y))


class Centred(nn.Module):
    """Distances from a centre that moves, as those of self-distillation do."""

    def __init__(self, move):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.move = move

    def forward(self, output, target):
        loss = (output - self.centre - target).square().sum()
        self.move(self, output.detach())
        return loss


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "move",
    [lambda own, output: own.centre.lerp_(output[0], 0.1), lambda own, output: setattr(own, "centre", own.centre.lerp(output[0], 0.1))],
    ids=["lerp_", "anew"],
)
def test_a_criterion_that_changes_its_buffer_is_refused(move, method, device):
    """The second left a tensor of psg's pass in the criterion, on which every later call failed; the first fell to the loop."""
    criterion = Centred(move).to(device)
    loss, params = psg.stateless(nn.Linear(3, 4).to(device), criterion)
    batch = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    with pytest.raises(psg.StateError, match=r"of the criterion \(Centred\) changes its buffer 'the criterion.centre'"):
        psg.per_sample_grad(loss, method=method)(params, *batch)
    criterion.move = lambda own, output: None
    assert not torch._C._functorch.is_gradtrackingtensor(criterion.centre)
    assert_trees_close(psg.per_sample_grad(loss)(params, *batch), loop_grad(loss)(params, *batch))


def test_a_criterion_in_which_a_batch_normalisation_trains_is_refused(device):
    criterion = nn.Module()
    criterion.features = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    criterion.forward = lambda output, target: (criterion.features(output) - target).square().sum()
    loss, params = psg.stateless(nn.Linear(3, 4).to(device), criterion.to(device))
    batch = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    with pytest.raises(psg.StateError, match=r"the criterion.features.1 \(BatchNorm1d\) is in training mode"):
        psg.per_sample_grad(loss)(params, *batch)
    criterion.eval()
    assert_trees_close(psg.per_sample_grad(loss)(params, *batch), loop_grad(loss)(params, *batch))


@pytest.mark.parametrize("hold", ["parameter", "layer", "module"])
def test_a_criterion_that_holds_the_module_s_parameters_as_its_own(hold, device):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = {"parameter": module[0].weight, "layer": module[0], "module": module}[hold]

        def forward(self, output, target):
            held = {"parameter": lambda: self.held, "layer": lambda: self.held.weight, "module": lambda: self.held[0].weight}[hold]()
            return F.cross_entropy(output, target) + held.square().sum()

    criterion = Penalised()
    _expect_backward_s_gradients(module, criterion, torch.randn(N, 3, device=device), torch.randint(4, (N,), device=device))
    assert criterion.held is {"parameter": module[0].weight, "layer": module[0], "module": module}[hold]


class Counter(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.w, self.write = nn.Parameter(torch.ones(3)), write
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.write(self.seen, x)
        return self.w * x * self.seen


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "write",
    [
        lambda seen, x: seen.data.add_(1),
        lambda seen, x: seen.data.lerp_(x.detach().sum(), 0.5),
        lambda seen, x: torch.add(seen, 1, out=seen.data),
    ],
    ids=["add_", "lerp_", "out"],
)
def test_a_buffer_written_into_through_data_is_an_error(write, method, device):
    loss, params = psg.stateless(Counter(write).to(device), lambda output: output.sum())
    with pytest.raises(psg.StateError, match=r"changes its buffer 'seen'.*eval mode"):
        psg.per_sample_grad(loss, method=method)(params, torch.randn(4, 3, device=device))
    loss, params = psg.stateless(Counter(write).to(device).eval(), lambda output: output.sum())
    with pytest.raises(psg.StateError, match="run the module on the longest input once before"):
        psg.per_sample_grad(loss, method=method)(params, torch.randn(4, 3, device=device))


@pytest.mark.parametrize("criterion", [lambda output: output.square().sum(), nn.Flatten(0), None], ids=["function", "module", "none"])
def test_a_criterion_of_the_output_alone(criterion, device):
    loss, params = psg.stateless(nn.Linear(3, 1).to(device), criterion)
    psg.check(lambda p, x: loss(p, x).sum())(params, torch.randn(4, 3, device=device))


class _Chosen(nn.Module):
    """Writes one of two scales into its buffer, by the length of the sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        self.scale.copy_(torch.where(torch.tensor(x.shape[1] > 3, device=x.device), 2.0, torch.ones_like(self.scale)))
        return self.layer(x[..., None]) * self.scale


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_buffer_is_written_with_the_values_that_it_has(n, method, device):
    module = _Chosen().to(device)
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    x = torch.randn(n, 3, device=device)

    def plain(p, x):
        return (x[:, None] * p["layer.weight"][:, 0] + p["layer.bias"]).square().sum()

    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), loop_grad(plain)(params, x))
    assert_trees_close([loss(params, sample) for sample in x], [plain(params, sample) for sample in x])
    longer = torch.randn(n or 1, 4, device=device)
    for call in (psg.per_sample_grad(loss, method=method), lambda params, batch: loss(params, batch[0])):
        with pytest.raises(psg.StateError, match="changes its buffer 'scale'"):
            call(params, longer)
    assert (module.scale == 1).all()


def test_a_batch_that_writes_into_a_buffer_the_values_that_it_has(device):
    module, x = _Chosen().to(device), torch.randn(3, 3, device=device)
    losses, params = psg.stateless(module, lambda output: output.square().sum((1, 2)), batch_dim=None)
    psg.check(losses, method="batch")(params, x)
    with pytest.raises(psg.StateError, match="changes its buffer 'scale'"):
        psg.per_sample_grad(losses, method="batch")(params, torch.randn(3, 4, device=device))


def test_a_criterion_without_a_signature(device):
    loss, params = psg.stateless(nn.Linear(3, 2).to(device), torch.dist)
    psg.check(loss)(params, torch.randn(4, 3, device=device), torch.randn(4, 2, device=device))


@pytest.mark.parametrize("change", [nn.Module.float, lambda module: vector_to_parameters(torch.ones(8), module.parameters())])
def test_parameters_that_the_module_has_left_behind(change):
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    loss, params = psg.stateless(module, lambda output: output.sum())
    norms = psg.per_sample_norm(loss)
    stepped = {name: 2 * tensor for name, tensor in params.items()}
    change(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norms(stepped, x)  # not the tensors that stateless gave: a functional optimizer needs no module
        norms(dict(module.named_parameters()), x.to(module.weight.dtype))
    with pytest.warns(UserWarning, match=r"'weight' has been moved, cast or assigned anew.*Call stateless again"):
        norms(params, x)


def test_a_part_of_a_buffer_of_all_parameters_that_the_module_has_left_behind(device):
    module, x = nn.Linear(3, 2).to(device), torch.randn(4, 3, device=device)
    together = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    module.weight.data, module.bias.data = together[:6].view(2, 3), together[6:]
    loss, params = psg.stateless(module, lambda output: output.sum())
    module.bias.data = module.bias.data.clone()
    with pytest.warns(UserWarning, match=r"'bias' has been moved, cast or assigned anew"):
        psg.per_sample_norm(loss)(params, x)


@pytest.mark.parametrize("register", [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook])
def test_hooks_of_parameters_are_not_called(register):
    module = nn.Linear(3, 2)
    register(module.bias, lambda tensor: 2 * tensor)
    with pytest.warns(UserWarning, match="the parameter 'bias' has a hook"):
        loss, params = psg.stateless(module, lambda output: output.sum())
    assert psg.per_sample_grad(loss)(params, torch.randn(4, 3))["bias"].eq(1).all()


def test_a_module_is_no_batch_norm_by_its_name(device):
    class BatchNormFree(nn.Linear):
        """Has no statistics."""

    loss, params = psg.stateless(BatchNormFree(3, 2).to(device), lambda output: output.square().sum())
    x = torch.randn(4, 3, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(params, x), loop_grad(loss)(params, x))


class Turned(nn.Sequential):
    def forward(self, x):
        return super().forward(x.transpose(0, 1))


SEQUENCES = {
    "layer": (lambda **options: nn.LSTM(3, 4, **options), True),
    "after others": (
        lambda **options: nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Dropout()), nn.TransformerEncoderLayer(4, 2, **options)),
        True,
    ),
    "after a module of the user's": (lambda **options: nn.Sequential(nn.Sequential(Shift(1.0)), nn.GRU(4, 4, **options)), False),
    "in a forward of the user's": (lambda **options: Turned(nn.GRU(4, 4, **options)), False),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_layers_that_take_time_first_are_warned_of(name, recwarn):
    make, begins = SEQUENCES[name]
    psg.stateless(make(batch_first=True))
    psg.stateless(make(), batch_dim=1)
    psg.stateless(make(), batch_dim=None)
    with pytest.warns(UserWarning, match=r"without batch_first=True takes dimension 0 for time.*batch_dim=1") if begins else nullcontext():
        psg.stateless(make())


@pytest.mark.parametrize(
    "name, way_out",
    [
        ("DataParallel", r"wrapper\.module"),
        ("DistributedDataParallel", r"wait for ever.*ddp\.module"),
        ("FSDPModule", r"sharded over processes, which psg does not support"),
        ("FullyShardedDataParallel", r"sharded over processes, which psg does not support"),
        ("GradSampleModule", r"before it is wrapped"),
    ],
)
def test_wrapped_modules_are_refused(name, way_out):
    wrapper = type(name, (nn.Sequential,), {})(nn.Linear(3, 2))
    with pytest.raises(psg.InputError, match=rf"stateless\({name}\): .*{way_out}"):
        psg.stateless(wrapper, F.cross_entropy)


def test_an_output_whose_loss_is_none(device):
    class Labelled(nn.Linear):
        def forward(self, x, labels=None):
            loss = None if labels is None else F.cross_entropy(super().forward(x), labels)
            return types.SimpleNamespace(loss=loss)

    loss, params = psg.stateless(Labelled(3, 2, device=device))
    with pytest.raises(psg.InputError, match=r"\.loss = None: did the batch contain labels\?"):
        psg.per_sample_norm(loss)(params, {"x": torch.randn(4, 3, device=device)})


def test_a_module_may_hold_collections_without_a_length():
    class Irreps(tuple):
        def __len__(self):
            raise NotImplementedError

    model = torch.nn.Linear(3, 2)
    model.irreps = Irreps((1, 2))
    loss, params = psg.stateless(model, F.cross_entropy)
    assert psg.per_sample_norm(loss)(params, torch.randn(4, 3), torch.tensor([0, 1, 1, 0])).shape == (4,)


@pytest.mark.filterwarnings("error::UserWarning")
def test_leaves_that_fn_makes_are_its_own(device):
    def fn(w, x):
        return (w * x).square().sum() + torch.tensor(0.0, requires_grad=True, device=x.device)

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    for method in ("capture", "vmap", "loop"):
        assert not psg.per_sample_norm(fn, method=method)(w, x).requires_grad


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_kept_tensor_that_was_filled_through_a_view_is_an_error(method, device):
    memo = {}

    def fn(w, x):
        if "z" not in memo:
            memo["z"] = torch.zeros_like(x)
            memo["z"][:2].copy_(x[:2])
        return ((w * x + memo["z"]) ** 2).sum()

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    transform = psg.per_sample_grad(fn, method=method)
    transform(w, x)
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        transform(w, x)


class _Attending(nn.Module):
    """Keeps its activations, as many models of attention do."""

    def __init__(self):
        super().__init__()
        self.query, self.head, self.weights, self.all = nn.Linear(4, 4), nn.Linear(4, 2), None, ()

    def forward(self, x):
        self.weights = self.query(x).softmax(-1)
        self.all = (self.weights, self.weights.detach(), torch.ones(()))
        return self.head(self.weights * x)


@pytest.mark.parametrize("method", ["capture", "vmap"])
def test_activations_that_a_module_keeps(method, tmp_path, device):
    model, x = _Attending().to(device), torch.randn(5, 4, device=device)
    with torch.no_grad():
        model(x)  # where there was nothing, psg leaves nothing
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    for _ in range(2):
        grads = psg.per_sample_grad(loss, method=method)(params, x)
        torch.save(model, tmp_path / "model.pt")
        for own in (model, copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert "taken out" in repr(own.weights) and (method == "vmap" or own.all[2] == 1)
            for use in (torch.Tensor.mean, lambda tensor: tensor.shape, lambda tensor: tensor + 1, lambda tensor: tensor.numpy()):
                for tensor in own.weights, *own.all[:2]:
                    with pytest.raises(psg.StateError, match="let fn return it as aux"):
                        use(tensor)
    assert_trees_close(grads, loop_grad(loss)(params, x))
    assert model(x).shape == model.weights.shape[:1] + (2,)


def test_activations_that_a_module_keeps_inside_of_another_transform(device):
    model, x = _Attending().to(device), torch.randn(5, 4, device=device)
    model.weights = torch.zeros(())
    loss, params = psg.stateless(model, lambda output: output.square().sum())

    def fn(scale):
        model.weights = scale * torch.ones((), device=device)
        norms = psg.per_sample_norm(lambda p, x: (p * x).sum() * model.weights.detach())(x[0], x)
        return norms.sum() * model.weights

    scale = torch.tensor(2.0, device=device)
    assert_trees_close(torch.func.grad(fn)(scale), torch.func.grad(lambda scale: x.norm(dim=1).sum() * 2 * scale)(scale), per_sample=False)


class _Appending(nn.Module):
    """Keeps its activations in collections that are there before, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.items, self.entries, self.calls = nn.Linear(4, 2), [], {"none": None}, 0

    def forward(self, x):
        self.calls += 1
        output = self.linear(x)
        self.items.append(output)
        self.entries["last"] = output.detach()
        return output


@pytest.mark.parametrize("method", ["capture", "vmap"])
def test_activations_that_a_module_appends(method, tmp_path, device):
    """They stayed in the collections, where they could neither be copied nor saved."""
    model, x = _Appending().to(device), torch.randn(5, 4, device=device)
    kept = model.items, model.entries
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    for _ in range(2):
        grads = psg.per_sample_grad(loss, method=method)(params, x)
        torch.save(model, tmp_path / "model.pt")
        for own in (model, copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert len(own.items) == own.calls
            for tensor in (*own.items, own.entries["last"]):
                with pytest.raises(psg.StateError, match="let fn return it as aux"):
                    tensor.sum()
    assert model.items is kept[0] and model.entries is kept[1]
    assert_trees_close(grads, loop_grad(loss)(params, x))


class _Memoising(nn.Module):
    """Makes a constant in its first call."""

    def __init__(self, counts):
        super().__init__()
        self.linear, self.scale, self.tables, self.counts, self.calls = nn.Linear(4, 3), None, {}, counts, 0

    def forward(self, x):
        self.calls += self.counts
        if self.scale is None:
            self.scale = torch.arange(1.0, 4.0, device=x.device)
        shift = self.tables.setdefault("shift", torch.ones(3, device=x.device))
        return self.linear(x) * self.scale + shift


WITHIN = {
    "vmap": lambda norms, p: torch.func.vmap(norms)({name: leaf[None] for name, leaf in p.items()})[0],
    "grad": lambda norms, p: torch.func.grad(lambda p: ((own := norms(p)).sum(), own), has_aux=True)(p)[1],
    "jvp": lambda norms, p: torch.func.jvp(norms, (p,), (p,))[0],
    "nothing": lambda norms, p: norms(p),
}


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("outer", WITHIN.values(), ids=WITHIN)
def test_a_constant_that_a_module_keeps(outer, method, device):
    """Under a wrapper of a transform that has ended, it was taken for one made from the samples."""
    module, x = _Memoising(False).to(device), torch.randn(5, 4, device=device)
    loss, params = psg.stateless(module, lambda output: output.sum().tanh())
    expected = torch.stack([leaf.flatten(1).square().sum(1) for leaf in loop_grad(loss)(params, x).values()]).sum(0).sqrt()
    module.scale, module.tables = None, {}
    for _ in range(2):
        assert_trees_close(outer(lambda p: psg.per_sample_norm(loss, method=method)(p, x), params), expected)
    module(x)
    for _ in range(2):
        assert_trees_close(outer(lambda p: psg.per_sample_norm(loss, method=method)(p, x), params), expected)


def test_a_constant_that_a_module_keeps_and_counts(device):
    module, x = _Memoising(True).to(device), torch.randn(5, 4, device=device)
    loss, params = psg.stateless(module, lambda output: output.sum().tanh())
    norms = psg.per_sample_norm(loss, method="vmap")
    norms(params, x)
    with pytest.raises(psg.StateError, match="or under its vmap"):
        norms(params, x)
    with pytest.raises(psg.StateError, match="clear it, and run the module once, in this mode, before psg does"):
        module(x)
    module.scale, module.tables = None, {}
    module(x)
    assert_trees_close(norms(params, x), norms(params, x))


class _Keeping(nn.Module):
    """Keeps a value of a parameter, or of the samples, in some way, and writes into a tensor after a reshape: psg runs it a second time."""

    def __init__(self, place, value):
        super().__init__()
        self.linear, self.bias, self.place, self.value = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), place, value
        self.entries, self.items, self.empty = {}, [], None

    def forward(self, x):
        if self.place == "list":
            self.items.append(self.value(self, x))
            kept = self.items[0]
        elif self.place == "dict":
            kept = self.entries["kept"] if self.entries else self.entries.setdefault("kept", self.value(self, x))
        elif self.place == "empty":
            kept = self.empty = self.value(self, x) if self.empty is None else self.empty
        else:
            self.new = getattr(self, "new", None) or (self.value(self, x), 1)
            kept = self.new[0]
        return torch.relu_((self.linear(x) + kept).reshape(-1, 2, 2)).sum((1, 2))

    def holds_nothing(self):
        return not self.entries and not self.items and self.empty is None and not hasattr(self, "new")


def _total(output):
    return output.sum()


KEPT = {"parameter": lambda m, x: m.bias[torch.arange(4, device=x.device)], "sample": lambda m, x: 2 * x.detach() * m.bias.detach()}


@pytest.mark.parametrize("place", ["list", "dict", "empty", "new"])
@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop", "batch"])
def test_what_a_module_keeps_is_gone_after_a_pass(place, value, method, device):
    module = _Keeping(place, value).to(device)
    batched = method == "batch"
    loss, params = psg.stateless(module, (lambda output: output) if batched else _total, batch_dim=None if batched else 0)
    x = torch.randn(3, 4, device=device)
    rows = []
    for row in x:
        fresh = _Keeping(place, value).to(device)
        fresh.load_state_dict(module.state_dict())
        fresh(row[None]).sum().backward()
        rows.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in fresh.named_parameters()})
    expected = {name: torch.stack([row[name] for row in rows]) for name in params}
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), expected)
        assert module.holds_nothing()
    psg.check(loss, method=method)(params, x)
    live = {name: p.requires_grad_() for name, p in params.items()}
    norms = psg.per_sample_norm(loss, method=method)(live, x)  # a history: batch runs vmap, and compares it with the whole batch
    norms.sum().backward()
    assert module.holds_nothing()
    module(x)


def test_what_a_module_has_kept_before_does_not_come_back(device):
    """Neither in the place of a result, nor where a flag says that the result is there."""

    class Logging(nn.Linear):
        last, steps = None, 0

        def forward(self, x):
            self.last, self.steps = super().forward(x), self.steps + self.counts
            return self.last

    x = torch.randn(3, 2, device=device)
    for counts, before in ((0, True), (1, False)):
        module = Logging(2, 2).to(device)
        module.counts = counts
        if before:
            module(x)
        own = module.last
        loss, params = psg.stateless(module, _total)
        psg.per_sample_norm(loss)(params, x)
        assert module.last is not own
        with pytest.raises(psg.StateError, match="let fn return it as aux"):
            module.last.sum()


def test_a_module_keeps_its_constants(device):
    class Masked(nn.Linear):
        mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(2, device=x.device)
            return super().forward(x) * self.mask

    module = Masked(2, 2).to(device)
    loss, params = psg.stateless(module, _total)
    psg.per_sample_norm(loss, method="capture")(params, torch.randn(3, 2, device=device))
    assert_trees_close(module.mask, torch.ones(2, device=device))


def test_a_wrapper_that_a_transform_has_left_in_a_module(device):
    module = nn.Linear(2, 2).to(device)
    loss, params = psg.stateless(module, lambda output: output.sum())
    own = module.weight

    def leave(weight):
        del module._parameters["weight"]
        module._parameters["weight"] = weight
        return weight.sum()

    torch.func.grad(leave)(own)
    with pytest.raises(psg.StateError, match="'weight' is a tensor that a torch.func transform has left there"):
        psg.per_sample_grad(loss)(params, torch.randn(3, 2, device=device))
    module._parameters["weight"] = own
    psg.per_sample_grad(loss)(params, torch.randn(3, 2, device=device))


def test_stateless_in_a_function_that_a_transform_differentiates(device):
    module, x = nn.Linear(3, 2).to(device), torch.randn(4, 3, device=device)

    def norms(scale):
        loss, params = psg.stateless(module, lambda output: (scale * output).square().sum())
        return psg.per_sample_norm(loss)(params, x).sum()

    one = torch.ones((), device=device)
    slope = 2 * norms(one)  # the norms are proportional to the square of the scale
    torch.testing.assert_close(torch.func.grad(norms)(one), slope)
    torch.testing.assert_close(torch.func.jvp(norms, (one,), (one,))[1], slope)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_stateless_loss_in_a_function_of_several_samples(method, device):
    loss, params = psg.stateless(nn.Linear(3, 2).to(device), lambda output: output.square().sum())

    def norms(p, xs):
        return psg.per_sample_norm(loss)(p, xs).sum()

    def plain(p, xs):
        outputs = xs @ p["weight"].T + p["bias"]
        return 2 * (outputs.square().sum(1) * (xs.square().sum(1) + 1)).sqrt().sum()

    x = torch.randn(3, 4, 3, device=device)
    assert_trees_close(psg.per_sample_grad(norms, method=method)(params, x), loop_grad(plain)(params, x))


class _OwnNorm(nn.Module):
    """Adds the norm of its layer's gradient to the layer's output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        loss, _ = psg.stateless(self.layer, lambda output: output.square().sum())
        return self.layer(x) + psg.per_sample_norm(loss)(dict(self.layer.named_parameters()), x)[:, None]


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("n", [1, 3])
def test_stateless_of_a_submodule_in_the_forward_pass(n, method, device):
    module, x = _OwnNorm().to(device), torch.randn(n, 3, device=device)
    loss, params = psg.stateless(module, lambda output: output.square().sum())

    def plain(p, x):
        output = p["layer.weight"] @ x + p["layer.bias"]
        return (output + 2 * (output.square().sum() * (x.square().sum() + 1)).sqrt()).square().sum()

    found = psg.per_sample_grad(loss, method=method)(params, x)
    assert_trees_close(found, loop_value_and_grad(plain)(params, x)[1])
    assert not any(gradient.requires_grad for gradient in found.values())


class _WithLoss(nn.Module):
    """Its loss is computed inside, with the default reduction, which graphs of ATen's ops leave out."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.filler = nn.Linear(4, 6), nn.InstanceNorm1d(2, affine=True), nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        hidden = self.norm(self.linear(x).unflatten(1, (2, 3)))
        hidden = torch.where(hidden > 1, self.filler, hidden)
        return F.cross_entropy(hidden, y) + F.mse_loss(hidden.mT.sum(1), x[:, :2]) + F.smooth_l1_loss(hidden.mean((1, 2)), x[:, 0])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:The .grad attribute", "ignore:.*isinstance")
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_programs_with_losses(decomposed):
    module = _WithLoss().double()
    x, y = torch.randn(N, 4, dtype=torch.float64), torch.randint(2, (N, 3))
    program = torch.export.export(module, (x, y), dynamic_shapes=({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}))
    exported = (program.run_decompositions() if decomposed else program).module()
    own = {name: p.detach() for name, p in module.named_parameters()}
    held = {name: p.detach() for name, p in exported.named_parameters()}

    def loss(module):
        return lambda params, x, y: functional_call(module, params, (x[None], y[None]))

    assert_trees_close(psg.per_sample_grad(loss(exported))(held, x, y), loop_grad(loss(module))(own, x, y))


@pytest.mark.parametrize("reduction", [{}, {"reduction": 2}])
@pytest.mark.parametrize(
    "name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "binary_cross_entropy"]
)
def test_losses_of_aten_keep_their_own_default(name, reduction, device):
    """The mean; that of torch's functions of these names is no reduction."""
    loss = getattr(torch.ops.aten, name).default
    w, x = torch.rand(3, device=device), torch.rand(N, 2, 3, device=device)

    def fn(w, x):
        return loss((w * x[0]).sigmoid(), x[1], **reduction).sum().exp()

    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    batched = psg.per_sample_grad(lambda w, x: loss((w * x[:, 0]).sigmoid(), x[:, 1], reduction=0).sum(1), method="batch")(w, x)
    assert_trees_close(batched, loop_grad(lambda w, x: loss((w * x[0]).sigmoid(), x[1], reduction=2))(w, x))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize("inner", ["auto", "loop"])
def test_torchscript_in_psg_inside_psg(inner, device):
    """The inner call knows that TorchScript is right in its own loop, and not that it is wrong in the outer pass."""

    @torch.jit.script
    def act(x):
        return torch.tanh(x) * x.sigmoid()

    def fn(w, x):
        return psg.per_sample_norm(lambda v, a: act(a @ v).sum(), method=inner)(w, x).sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 2, 4, device=device)
    found = psg.per_sample_grad(fn)(w, x)
    assert found.any()
    assert_trees_close(found, loop_grad(fn)(w, x))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize("op", [torch.tanh, lambda x: torch.roll(x, [1], [0])])
def test_a_refusal_of_torchscript_that_fn_catches(op, device):
    act = torch.jit.trace(op, torch.randn(3, device=device))

    def fn(w, x):
        try:
            return (act(x @ w) * x[:3]).sum()
        except Exception:
            return (x @ w).sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    if op is not torch.tanh:
        with pytest.raises(psg.PsgError, match="the function handles an error"):
            torch.func.vmap(psg.per_sample_grad(fn, method="loop"), (None, 0))(w, x[None])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:The .grad attribute", "ignore:.*isinstance")
def test_an_exported_assignment():
    """In the graph an index_put_ with an index of None, which torch's function of that name does not take."""

    class Assigned(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.filler = nn.Linear(4, 3), nn.Parameter(torch.randn(2))

        def forward(self, x):
            hidden = self.linear(x) * 1
            hidden[:, torch.tensor([0, 2])] = self.filler
            return hidden.sin()

    module, x = Assigned(), torch.randn(N, 4)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    loss, params = psg.stateless(exported, lambda output: output.sum())
    original, own = psg.stateless(module, lambda output: output.sum())
    assert_trees_close(psg.per_sample_grad(loss, method="capture")(params, x), loop_grad(original)(own, x))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
def test_a_refusal_inside_psg_that_fn_catches(device):
    """The outer pass hears of it: in a loop the inner call succeeds, and no sample would take the other branch."""

    @torch.jit.script
    def act(x):
        return torch.tanh(x) * x.sigmoid()

    def fn(w, x):
        try:
            return psg.per_sample_norm(lambda v, a: act(a @ v).sum())(w, x[None]).sum()
        except Exception:
            return (w * 0).sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 4, device=device)
    for _ in range(3):
        act((x @ w).requires_grad_()).sum().backward()
    found = psg.per_sample_grad(fn)(w, x)
    assert found.any()
    assert_trees_close(found, loop_grad(fn)(w, x))


class WithCopy(nn.Module):
    """Compares its head with a copy of it, whose two layers share one weight."""

    def __init__(self, frozen):
        super().__init__()
        self.body, self.frozen = nn.Linear(3, 4), frozen
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head[2].weight = self.head[0].weight

    def forward(self, x):
        head = copy.deepcopy(self.head)
        assert head[0].weight is head[2].weight and head[0].weight is not self.head[0].weight
        assert len(list(head.parameters())) == 3 and all(isinstance(p, nn.Parameter) for p in head.parameters())
        assert all(p.requires_grad and p.is_leaf for p in head.parameters())
        for parameter in head.parameters() if self.frozen else ():
            parameter.requires_grad_(False)
        hidden = self.body(x)
        return self.head(hidden) * head(hidden).sin()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_copy_of_a_part_that_forward_makes(frozen, device):
    """Gradients reach the part itself alone: a copy is a leaf of its own."""
    loss, params = psg.stateless(WithCopy(frozen).to(device), F.mse_loss)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    for n in (0, 1, N):
        expected = loop_value_and_grad(loss)(params, x[:n], y[:n])
        assert_trees_close(psg.per_sample_value_and_grad(loss, method="capture")(params, x[:n], y[:n]), expected)
    assert psg.explain(loss)(params, x, y).rung == "capture"
    psg.check(loss)(params, x, y)


# What forward leaves in the module


class Layers(nn.Module):
    """Two layers, and a list that holds the first one's weight once more, or what is made of it."""

    def __init__(self, hold=lambda layer: None):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        self.held = [hold(self.a)]

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).sum()


class Evaluating(Layers):
    def forward(self, x):
        was = self.training
        self.eval()
        with torch.no_grad():
            steps = x
            while steps.abs().sum() > 1:  # the samples take different numbers of steps
                steps = steps / 2
        self.train(was)
        return super().forward(x) * (3 if self.training else 1) + steps.sum()


class Retrying(Layers):
    def forward(self, x):
        was, self.training = self.training, False
        (inner,) = torch.autograd.grad(self.a(x).square().sum(), self.a.weight, create_graph=True)
        self.training = was
        return super().forward(x) * (3 if self.training else 1) + inner.sum()


class Hooking(Layers):
    def forward(self, x):
        handle = self.a.register_forward_hook(lambda module, _, output: output * 2)
        hidden = torch.tanh(self.a(x))
        hidden.register_hook(lambda cotangent: cotangent)
        handle.remove()
        return self.b(hidden).sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("kind", [Evaluating, Retrying, Hooking])
def test_a_pass_that_is_given_up_leaves_the_module_as_it_was(kind, device):
    """The next pass met another mode, or another hook."""
    module = kind().to(device)
    loss, params = psg.stateless(module)
    x = torch.randn(5, 3, device=device)
    plain = copy.deepcopy(module)
    expected = [torch.autograd.grad(plain(row[None]), list(plain.parameters())) for row in x]
    columns = dict(zip(params, map(torch.stack, zip(*expected, strict=True)), strict=True))
    assert_trees_close(psg.per_sample_grad(loss)(params, x), columns)
    assert module.training and not module.a._forward_hooks


class Counting(Layers):
    """Each call counts; what psg learns in the first, it learns after forward has returned."""

    def __init__(self, then):
        super().__init__()
        self.calls, self.turns, self.then = 0, [1.0, 2.0, 4.0], then

    def forward(self, x):
        factor = self.turns[0] / (1 + self.calls)
        self.calls += 1
        self.turns.append(self.turns.pop(0))
        return self.then(factor * super().forward(x), x)


def caught(output, x):
    try:
        x.view(7)
    except RuntimeError:
        return output
    raise AssertionError


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "then, requires_grad",
    [(caught, False), (lambda output, x: output * (1 + 0 * torch.rand_like(output)), True), (lambda output, x: output, False)],
    ids=["an error caught", "random numbers with a history", "nothing"],
)
def test_a_pass_that_is_given_up_after_forward_leaves_the_module_as_it_was(then, requires_grad, device):
    """The next pass went on from where the last had stopped: another value, and another gradient."""
    module = Counting(then).to(device)
    loss, params = psg.stateless(module)
    given, x = dict(module.named_parameters()) if requires_grad else params, torch.randn(1, 3, device=device)
    values, grads = psg.per_sample_value_and_grad(loss)(given, x)
    assert module.calls == 1 and module.turns == [2.0, 4.0, 1.0]
    module.calls, module.turns = 0, [1.0, 2.0, 4.0]
    expected = module(x)
    columns = dict(zip(params, (g[None] for g in torch.autograd.grad(expected, list(module.parameters()))), strict=True))
    assert_trees_close((values.detach(), {name: grad.detach() for name, grad in grads.items()}), (expected.detach()[None], columns))


class Cast(Layers):
    def forward(self, x):
        self.a.to(torch.float32)
        hidden = self.a(x.float()).to(x.dtype)
        self.a.to(x.dtype)
        return self.b(hidden).sum()


class Rerunning(Layers):
    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(x @ self.held[0].T), x.clone().requires_grad_(), use_reentrant=True)
        return self.b(hidden).sum()


class Replacing(Layers):
    def forward(self, x):
        self.a.weight = nn.Parameter(self.a.weight.clamp(-1, 1))
        return super().forward(x)


class Scripted(Layers):
    def forward(self, x):
        return self.b(self.held[0](x)).sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_norm, psg.factored_grad])
@pytest.mark.parametrize(
    ("kind", "hold", "error"),
    [
        (Cast, lambda layer: None, "changes the dtype of a parameter in place"),
        (Rerunning, lambda layer: layer.weight, "the module uses its parameter 'a.weight' from a list"),
        (Replacing, lambda layer: None, "puts another tensor in the place of the parameter 'a.weight'"),
        (Scripted, torch.jit.script, "the module uses its parameter 'a.weight' from a list"),
    ],
    ids=["cast", "rerun", "replaced", "scripted"],
)
def test_what_would_lose_a_gradient_is_refused(kind, hold, error, transform, device):
    """Each gave zeros, or an error of torch's, for the first layer."""
    loss, params = psg.stateless(kind(hold).to(device))
    with pytest.raises(psg.PsgError, match=error):
        transform(loss)(params, torch.randn(4, 3, device=device))


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_a_buffer_computed_from_a_parameter_is_refused(method, device):
    module = Layers().to(device)
    module.register_buffer("doubled", module.a.weight * 2)
    loss, params = psg.stateless(module, lambda output, x: output + (x @ module.doubled).sum())
    with pytest.raises(psg.StateError, match="computed from its parameter 'a.weight' before the call"):
        psg.per_sample_grad(loss, method=method)(params, *torch.randn(2, 4, 3, device=device))


class Busy(nn.Linear):
    """Writes in every call; its flag is as before after each."""

    busy = calls = 0

    def forward(self, x):
        self.busy = True
        self.weight.data.clamp_(-0.3, 0.3)
        self.busy = False
        return super().forward(x)


class Initialised(nn.Linear):
    """Writes in the first call alone; sets its flag before it writes."""

    done: bool | str | None = None

    def forward(self, x):
        if not self.done:
            self.done = "done"
            self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_marks_of_writes_into_parameters(method, device):
    x = torch.randn(4, 3, device=device)
    module = Busy(3, 3).to(device)
    module.busy = False
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    clamped = {name: p.clamp(-0.3, 0.3) if name == "weight" else p for name, p in params.items()}
    plain, _ = psg.stateless(nn.Linear(3, 3).to(device), lambda output: output.square().sum())
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), psg.per_sample_grad(plain)(clamped, x))
    loss, params = psg.stateless(Initialised(3, 3).to(device), lambda output: output.square().sum())
    for _ in range(2):
        with pytest.raises(psg.StateError, match="writes into the parameter 'weight' and changes 'done'"):
            psg.per_sample_grad(loss, method=method)(params, x)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_parameter_that_forward_registers_once_more(method, device):
    class Noting(nn.Linear):
        def forward(self, x):
            self.last = self.weight
            return super().forward(x)

    module = Noting(3, 3).to(device)
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    x = torch.randn(4, 3, device=device)
    first = psg.per_sample_grad(loss, method=method)(params, x)
    assert module.last is module.weight and list(dict(module.named_parameters())) == ["weight", "bias"]
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), first)


@pytest.mark.parametrize("method", ["capture", "vmap", "loop", "batch"])
def test_a_module_that_is_moved_to_where_it_is(method, device):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.inner.to(x.device)(x).tanh())

    module = Moving().to(device)
    batch_dim = None if method == "batch" else 0
    loss, params = psg.stateless(module, lambda output: output.square().sum(None if batch_dim == 0 else 1), batch_dim=batch_dim)
    x = torch.randn(N, 3, device=device)
    expected = loop_grad(lambda p, x: functional_call(module, p, (x,)).square().sum())(params, x)
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), expected)
    assert all(param.data_ptr() == params[name].data_ptr() for name, param in module.named_parameters())


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_sparse_tensor_that_is_written_into(method, device):
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            matrix = torch.eye(4, device=x.device).to_sparse()
            matrix += torch.eye(4, device=x.device).to_sparse()
            return torch.sparse.mm(matrix, (self.weight * x)[:, None])

    loss, params = psg.stateless(Doubling().to(device), lambda output: output.square().sum(), batch_dim=None)
    x = torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x), {"weight": 8 * params["weight"] * x.square()})


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_a_sparse_buffer_that_is_written_into_is_refused(method, device):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("seen", torch.eye(3).to_sparse())

        def forward(self, x):
            self.seen += torch.eye(3, device=x.device).to_sparse()
            return super().forward(x)

    module = Counting().to(device)
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    with pytest.raises(psg.StateError, match="'seen'"):
        psg.per_sample_grad(loss, method=method)(params, torch.randn(N, 3, device=device))
    assert torch.equal(module.seen.to_dense(), torch.eye(3, device=device))


FROM_A_LIST, BY_A_REFERENCE = "the module uses its parameter 'weight' from a list", "the criterion uses the module's parameter 'weight'"


@pytest.mark.parametrize(
    "how, message",
    [
        (_bound, FROM_A_LIST),
        (torch.jit.CompilationUnit("def product(w: Tensor, x: Tensor) -> Tensor:\n    return x @ w\n").product, FROM_A_LIST),
        (_scripted, BY_A_REFERENCE),
    ],
    ids=["autograd.Function", "torch.jit", "torch.jit.script"],
)
def test_a_batch_whose_module_hands_on_a_parameter_held_elsewhere_is_refused(how, message, device):
    module = nn.Linear(3, 3, bias=False).to(device)
    held = Holder(module.weight)
    losses, params = psg.stateless(module, lambda output: torch.stack([how(held.weight, row).sum() for row in output]), batch_dim=None)
    with pytest.raises(psg.StateError, match=message):
        psg.per_sample_grad(losses, method="batch")(params, torch.randn(4, 3, device=device))


def test_a_batch_that_freezes_a_parameter_in_forward_is_refused(device):
    module = nn.Linear(3, 3).to(device)

    def losses(params, x):
        params["weight"].requires_grad_(False)
        return torch.func.functional_call(module, params, (x,)).square().sum(1)

    params = {name: param.detach() for name, param in module.named_parameters()}
    with pytest.raises(psg.InputError, match=r"requires_grad_\(False\) on params\['weight'\]"):
        psg.per_sample_grad(losses, method="batch")(params, torch.randn(4, 3, device=device))
