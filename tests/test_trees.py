"""Containers of every origin as parameters, as batches and as auxiliary output; how paths are written."""

import collections
import dataclasses
import functools
import threading
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from cases import N, score

import psg
from psg import _trees
from psg.testing import assert_trees_close, loop_grad
from psg.testing._loop import tree_map


@dataclasses.dataclass
class Plain:
    """An unregistered dataclass, with an __init__ that does more than assign."""

    weight: torch.Tensor
    bias: torch.Tensor
    checked: bool = dataclasses.field(default=True)

    def __post_init__(self):
        assert isinstance(self.weight, torch.Tensor)


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: torch.Tensor
    bias: torch.Tensor


@optree.dataclasses.dataclass(namespace="psg")
class Registered:
    weight: torch.Tensor
    bias: torch.Tensor


class Known:
    """Registered only with torch's pytree."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias


torch_pytree.register_pytree_node(Known, lambda node: ([node.weight, node.bias], None), lambda leaves, _: Known(*leaves))

Named = collections.namedtuple("Named", "weight bias")
AS_ATTRIBUTES = [Plain, Frozen, Registered, Known, Named]
AS_ITEMS = [dict, collections.OrderedDict, collections.UserDict, lambda items: collections.defaultdict(list, items)]


def by_attributes(node, x):
    return score(F.linear(x, node.weight, node.bias))


def by_items(node, x):
    return score(F.linear(x, node["weight"], node["bias"]))


@pytest.fixture
def tensors(device):
    return torch.randn(4, 3, device=device), torch.randn(4, device=device)


@pytest.fixture
def x(device):
    return torch.randn(N, 3, device=device)


@pytest.mark.parametrize("kind", [Frozen, Registered, Known, Named], ids=lambda kind: kind.__name__)
def test_parameters_in_attributes(kind, tensors, x):
    grads = psg.per_sample_grad(by_attributes)(kind(*tensors), x)
    expected = loop_grad(lambda p, x: by_attributes(Named(*p), x))(tensors, x)
    assert isinstance(grads, kind)
    assert_trees_close((grads.weight, grads.bias), expected)


@pytest.mark.parametrize("kind", AS_ITEMS, ids=["dict", "OrderedDict", "UserDict", "defaultdict"])
def test_parameters_in_items(kind, tensors, x):
    grads = psg.per_sample_grad(by_items)(kind({"weight": tensors[0], "bias": tensors[1]}), x)
    expected = loop_grad(lambda p, x: by_attributes(Named(*p), x))(tensors, x)
    assert_trees_close((grads["weight"], grads["bias"]), expected)


@pytest.mark.parametrize("kind", AS_ATTRIBUTES, ids=lambda kind: kind.__name__)
def test_batches_in_attributes(kind, device):
    w, xs, ys = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device), torch.randn(N, 4, device=device)
    fn = lambda w, batch: score(F.linear(batch.weight, w) * batch.bias)  # noqa: E731
    grads = psg.per_sample_grad(fn)(w, kind(xs, ys))
    assert_trees_close(grads, loop_grad(lambda w, x, y: fn(w, Named(x, y)))(w, xs, ys))


@pytest.mark.parametrize("kind", AS_ATTRIBUTES, ids=lambda kind: kind.__name__)
def test_auxiliary_output_in_attributes(kind, tensors, x):
    def fn(p, x):
        return score(F.linear(x, *p)), kind(x, 2 * x.sum())

    _, aux = psg.per_sample_grad(fn, has_aux=True)(tensors, x)
    assert_trees_close((aux.weight, aux.bias), (x, 2 * x.sum(1)))


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_none_and_empty_containers_are_kept(method, tensors, x):
    params = {"layer": tensors, "none": None, "empty": (), "nothing": {}}
    grads = psg.per_sample_grad(lambda p, x: score(F.linear(x, *p["layer"])), method=method)(params, x)
    assert set(grads) == set(params) and grads["none"] is None and grads["empty"] == () and grads["nothing"] == {}
    assert_trees_close(grads["layer"], loop_grad(lambda p, x: score(F.linear(x, *p)))(tensors, x))


def test_the_order_of_a_dict_is_the_caller_s(x):
    params = {"z": torch.ones(3, device=x.device), "a": torch.zeros(3, device=x.device)}
    grads = psg.per_sample_grad(lambda p, x: (p["z"] * x).sum() + 2 * (p["a"] * x).sum())(params, x)
    assert list(grads) == ["z", "a"]
    assert_trees_close(grads, {"z": x, "a": 2 * x})


@pytest.mark.parametrize(
    "tree, path",
    [
        ({"a": [0, 0.5]}, ["p['a'][0]", "p['a'][1]"]),
        ((0, {"b": 0.5}), ["p[0]", "p[1]['b']"]),
        (Named(0, 0.5), ["p.weight", "p.bias"]),
        (Registered(0, 0.5), ["p.weight", "p.bias"]),
        (0.5, ["p"]),
    ],
)
def test_paths_are_written_as_python_writes_them(tree, path):
    assert _trees.paths(tree, "p") == path


def test_labels_of_groups_get_keys(tensors, x):
    seen = []
    params = {"layers": [tensors[0], Named(tensors[0], tensors[1])]}
    label = psg.clipping.PerGroup(label=lambda path: seen.append(path) or "all", clip_norm={"all": 1.0})
    fn = lambda p, x: by_attributes(p["layers"][1], x) + p["layers"][0].sum()  # noqa: E731
    psg.clipped_grad(fn, label)(params, x)
    assert [path[:2] for path in seen] == [("layers", 0), ("layers", 1), ("layers", 1)]
    assert len(set(seen)) == 3


def test_a_tree_of_gradients_can_be_mapped(tensors, x):
    grads = psg.per_sample_grad(by_attributes)(Frozen(*tensors), x)
    doubled = tree_map(lambda leaf: 2 * leaf, grads)
    assert_trees_close(psg.tree.norm(doubled), 2 * psg.tree.norm(grads))


def test_threads_meet_a_container_at_once():
    """optree registers a type only once: threads that come second must find it registered."""
    for _ in range(30):
        kind = dataclasses.make_dataclass("Fresh", ["x"])
        ready, failures = threading.Barrier(4), []

        def work(kind=kind, ready=ready, failures=failures):
            ready.wait()
            try:
                assert len(_trees.flatten([kind(1), kind(2)])[0]) == 2
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_a_container_that_is_registered_after_it_was_met(device):
    class Late:
        def __init__(self, weight, bias):
            self.weight, self.bias = weight, bias

    late, x = Late(torch.randn(4, 3, device=device), torch.randn(4, device=device)), torch.randn(N, 3, device=device)
    with pytest.raises(psg.InputError, match="is a Late; expected a tensor"):
        psg.per_sample_grad(by_attributes)(late, x)
    torch_pytree.register_pytree_node(Late, lambda node: ([node.weight, node.bias], None), lambda leaves, _: Late(*leaves))
    assert psg.per_sample_grad(by_attributes)(late, x).weight.shape == (N, 4, 3)


class Options(dict):
    """A mapping with an attribute that has a default, and with what it has computed."""

    scale = 1.0

    @functools.cached_property
    def count(self):
        return len(self["x"])


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    scale = 1.0  # no field

    @functools.cached_property
    def count(self):
        return len(self.x)

    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize("kind", [Options, Example])
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_attributes_beside_the_leaves(kind, method, device):
    def fn(w, example):
        assert example.count == 4
        return score(w * example["x"]) * example.scale

    w, x = torch.randn(4, device=device), torch.randn(N, 4, device=device)
    batch = kind(x=x)
    batch.scale = 3.0
    assert batch.count == N
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, batch), loop_grad(lambda w, x: 3 * score(w * x))(w, x))
    fast = psg.jit(psg.per_sample_norm(fn), backend="eager")
    fast(w, batch)
    batch.scale = 2.0
    assert_trees_close(fast(w, batch), psg.per_sample_norm(lambda w, x: 2 * score(w * x))(w, x))


class Counted(collections.UserDict):
    """A mapping whose constructor derives an attribute, with another that says nothing of its leaves."""

    step = 0

    def __init__(self, data=None):
        super().__init__(data or {})
        self.length = data["x"].shape[0] if data else 0


def test_attributes_that_a_constructor_derives_are_each_sample_s_own(device):
    fn = lambda w, b: (b["x"] @ w).square() / b.length  # noqa: E731
    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, Counted({"x": x})), loop_grad(lambda w, x: (x @ w).square() / 3)(w, x))


def test_attributes_are_no_part_of_a_tree_s_structure(device):
    params, x = Counted({"x": torch.randn(3, device=device)}), torch.randn(N, 3, device=device)
    factored = psg.factored_grad(lambda p, x: score(p["x"] * x))
    one = factored(params, x)
    params.step = 1
    another = factored(params, x)
    assert_trees_close(psg.tree.inner(one, another), psg.tree.squared_norm(one))
    assert psg.tree.norm(psg.tree.concat([one, another])).shape == (2 * N,)
    assert psg.tree.materialize(another).step == 1


class Dotted(dict):
    """A mapping whose attributes are its keys."""

    __getattr__ = dict.get


def test_attributes_that_are_keys(device):
    x = torch.randn(N, 3, device=device)
    assert_trees_close(
        psg.per_sample_grad(lambda w, b: score(b.x * w))(torch.ones(3, device=device), Dotted(x=x)),
        loop_grad(lambda w, x: score(x * w))(torch.ones(3, device=device), x),
    )


@dataclasses.dataclass
class Lazy:
    """A dataclass with a field that is filled later."""

    x: torch.Tensor
    cache: Any = dataclasses.field(init=False)


def test_a_field_that_is_not_filled(device):
    batch = Lazy(torch.randn(3, 2, device=device))
    fn = lambda w, b: (w * b.x).sum() * (1 if hasattr(b, "cache") else 2)  # noqa: E731
    assert torch.equal(psg.per_sample_grad(fn)(torch.ones(2, device=device), batch), 2 * batch.x)
    batch.cache = torch.zeros(3, device=device)
    assert torch.equal(psg.per_sample_grad(fn)(torch.ones(2, device=device), batch), batch.x)
