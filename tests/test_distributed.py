"""Several processes give the results of one process that has all their samples."""

import dataclasses
import re
import warnings
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import psg
from psg.distributed import all_gather, all_reduce
from psg.factors import Conv, Dense, Outer, Rows, Scaled, Segments

SIZES = [3, 0, 2]  # samples of each process: Poisson sampling may leave one without any
OFFSETS = [0, 3, 3, 5]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 6)
        self.conv = nn.Conv1d(6, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.conv(self.table(ids).mT).mean(-1))


def problem():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    loss, params = psg.stateless(Net(), F.cross_entropy)
    return loss, params, torch.randint(50, (5, 8)), torch.randint(3, (5,))


def diagonal():
    return torch.arange(12.0).reshape(3, 4) + 1


@dataclasses.dataclass
class Pair:
    one: Any
    two: Any


class Key:
    """Shows its address, as objects do."""


def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except psg.InputError as error:
        return str(error)
    raise AssertionError("no error")


def f32(*shape):
    return torch.ones(shape, dtype=torch.float32)


def nested():
    return torch.nested.nested_tensor([f32(2), f32(3)], layout=torch.jagged)


OTHER = r"processes \[2\] differ from process 0, which has "
REFUSED = {  # the function that each process calls, its tree, and the message that all get
    "a key": (
        lambda rank: all_reduce,
        lambda rank: {"a": f32(2), "b" if rank < 2 else "c": f32(2)},
        OTHER + r"tree\['b'\] \(torch.float32 of shape \[2\] on cpu\) where process 2 has tree\['c'\] \(torch.float32 of shape \[2\]",
    ),
    "one leaf more": (
        lambda rank: all_reduce,
        lambda rank: [f32(2)] * (1 + (rank == 2)),
        OTHER + r"nothing more where process 2 has tree\[1\] \(",
    ),
    "a shape": (
        lambda rank: all_reduce,
        lambda rank: {"a": f32(2 - (rank == 2), 3)},
        OTHER + r"tree\['a'\] \(torch.float32 of shape \[2, 3\] .* where process 2 has tree\['a'\] \(torch.float32 of shape \[1, 3\]",
    ),
    "one number of entries": (lambda rank: all_reduce, lambda rank: f32(2, 3) if rank < 2 else f32(3, 2), OTHER + r"tree \(.*\[2, 3\]"),
    "a dtype": (lambda rank: all_reduce, lambda rank: f32(2) if rank < 2 else f32(2).double(), OTHER + r".*float32.* 2 has .*float64"),
    "integers": (lambda rank: all_reduce, lambda rank: f32(2).double() if rank < 2 else f32(2).int(), OTHER + r".*float64.* 2 has .*int64"),
    "complex": (lambda rank: all_reduce, lambda rank: f32(2, 2) if rank < 2 else f32(2) * 1j, OTHER + r".*float32.* 2 has .*complex64"),
    "the order": (
        lambda rank: all_reduce,
        lambda rank: OrderedDict((key, f32(2)) for key in ("ab" if rank < 2 else "ba")),
        OTHER + r"tree\['a'\] .* where process 2 has tree\['b'\]",
    ),
    "no leaves": (lambda rank: all_reduce, lambda rank: f32(2) if rank < 2 else (), r"processes \[2\]: the tree has no leaves"),
    "a bool": (lambda rank: all_reduce, lambda rank: f32(2) > rank, r"processes \[0, 1, 2\]: expected .* tree is of dtype torch.bool"),
    "a sparse sum": (
        lambda rank: all_reduce,
        lambda rank: [f32(2, 2) if rank != 1 else f32(2, 2).to_sparse()],
        r"processes \[1\]: expected tensors of numbers.*; tree\[0\] is a tensor of layout torch.sparse_coo. .* to_dense",
    ),
    "another function": (
        lambda rank: all_reduce if rank < 2 else all_gather,
        lambda rank: f32(2),
        OTHER + "a call of all_reduce where process 2 has a call of all_gather",
    ),
    "samples of other shapes": (
        lambda rank: all_gather,
        lambda rank: f32(2 - rank, 3 + (rank == 2)),
        OTHER + r"tree \(torch.float32 of shape \[n, 3\] on cpu\) where process 2 has tree \(torch.float32 of shape \[n, 4\]",
    ),
    "samples of two sizes": (
        lambda rank: all_gather,
        lambda rank: (f32(2), f32(2), f32(3 if rank == 1 else 2)),
        r"processes \[1\]: the leaves disagree on the number of samples: tree\[0\] has 2, tree\[2\] has 3",
    ),
    "no dimension": (lambda rank: all_gather, lambda rank: f32(*[2] * rank), r"processes \[0\]: .*tree is a tensor without dimensions"),
    "sparse": (
        lambda rank: all_gather,
        lambda rank: {"a": f32(2, 2) if rank != 1 else f32(2, 2).to_sparse()},
        r"processes \[1\]: expected tensors \[n, \*\] or factors; tree\['a'\] is a tensor of layout torch.sparse_coo",
    ),
    "nested": (lambda rank: all_gather, lambda rank: f32(2, 2) if rank != 1 else nested(), r"processes \[1\]: .*tree is a nested tensor"),
    "meta": (lambda rank: all_gather, lambda rank: f32(2).to("cpu" if rank != 1 else "meta"), r"processes \[1\]: .* on the meta device"),
    "quantized": (
        lambda rank: all_gather,
        lambda rank: f32(2) if rank != 1 else torch.quantize_per_tensor(f32(2), 0.1, 0, torch.qint8),
        r"processes \[1\]: .* is a quantized tensor",
    ),
    "a factor of sparse tensors": (
        lambda rank: all_gather,
        lambda rank: Dense(f32(2, 2) if rank != 1 else f32(2, 2).to_sparse()),
        r"processes \[1\]: .*tree holds a tensor of layout torch.sparse_coo",
    ),
}


def work(rank, path):
    """Saves the results of one process, which the tests read."""
    warnings.simplefilter("error", psg.FallbackWarning)
    torch.set_num_threads(1)
    wait = timedelta(minutes=2)  # processes that do not meet fail instead of waiting for half an hour
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=len(SIZES), timeout=wait)
    loss, params, ids, labels = problem()
    own = slice(OFFSETS[rank], OFFSETS[rank + 1])
    out = psg.clipped_grad(loss, 0.5)(params, ids[own], labels[own])
    grads, norms = psg.distributed.all_reduce(out.grads), psg.distributed.all_gather(out.norms)
    factored = psg.factored_grad(loss)(params, ids[own], labels[own])
    gathered = psg.distributed.all_gather(factored)
    pair = dist.new_group([0, 2])
    uneven = psg.factored_grad(loss)(params, ids[own, : 8 - rank], labels[own])
    found = {
        "grads": grads,
        "norms": norms,
        "gram": psg.tree.gram(gathered),
        "kinds": {name: type(factor) for name, factor in gathered.items()},
        "uneven": psg.tree.materialize(psg.distributed.all_gather(uneven)),
        "uneven kinds": {name: type(factor) for name, factor in psg.distributed.all_gather(uneven).items()},
        "sparse": psg.tree.sparse_weighted_sum(gathered, psg.distributed.all_gather(out.clip_coef["table.weight"])),
        "mixed": psg.distributed.all_reduce(
            {
                "half": torch.tensor([256.0 if rank == 0 else 1.0, rank], dtype=torch.bfloat16),
                "count": torch.tensor(rank),
                "float": torch.ones(3, dtype=torch.float32),
                "complex": torch.tensor([1 + rank * 1j], dtype=torch.complex64),
                "history": torch.ones(2, requires_grad=True) * 2,
            }
        ),
        "segments": psg.distributed.all_gather(psg.tree.segment_sum(factored, torch.arange(SIZES[rank]) // 2, (SIZES[rank] + 1) // 2)),
        "scaled": psg.distributed.all_gather(Scaled(factored["head.weight"], diagonal().expand(SIZES[rank], 3, 4))),
        "scaled apart": psg.distributed.all_gather(Scaled(factored["head.weight"], (diagonal() + rank).expand(SIZES[rank], 3, 4))),
        "losses": psg.distributed.all_reduce(
            {"grads": torch.ones(2, dtype=torch.bfloat16), "loss": torch.ones((), dtype=torch.float32 if SIZES[rank] else torch.bfloat16)}
        ),
        "bytes": psg.distributed.all_reduce(torch.tensor([200], dtype=torch.uint8)),
        "nothing": psg.distributed.all_gather({"a": torch.zeros(0, 3)}),
        "noisy": psg.tree.add_noise(grads, 1.0, generator=torch.Generator().manual_seed(1)),
        "refused": {name: failure(function(rank), tree(rank)) for name, (function, tree, _) in REFUSED.items()},
        "pair": psg.distributed.all_reduce(torch.tensor(rank), group=pair) if rank != 1 else None,
        "outside": [failure(function, torch.ones(2), group=pair) for function in (all_reduce, all_gather)] if rank == 1 else None,
        "keys in any order": all_reduce({key: torch.tensor(ord(key)) for key in ("ab" if rank < 2 else "ba")}),
        "objects as keys": list(all_reduce({Key(): torch.tensor(rank), Key(): torch.ones(1)}).values()),
        "dataclass": dataclasses.astuple(all_gather(Pair(torch.tensor([rank]), torch.ones(1)))),
        "traced": traced(rank),
        "sharded": sharded(loss, params, ids[own], labels[own]),
    }
    torch.save(found, f"{path}/{rank}")
    dist.destroy_process_group()


def sharded(loss, params, ids, labels):
    """Two steps of Adam on parameters that the optimizer, its state and the sums hold in parts, and the error for those themselves."""
    mesh = init_device_mesh("cpu", (len(SIZES),))
    parts = {name: torch.nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])) for name, p in params.items()}
    optimizer = torch.optim.Adam(parts.values(), lr=0.1)
    for _ in range(2):
        out = psg.clipped_grad(loss, 0.5)({name: p.detach().full_tensor() for name, p in parts.items()}, ids, labels)
        for name, p in parts.items():
            own = DTensor.from_local(out.grads[name], mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
            noisy = psg.tree.add_noise({name: own}, 0.0)[name]
            p.grad = DTensor.from_local(noisy, mesh, [Shard(0)], shape=p.shape, stride=p.stride())
        optimizer.step()
    return {name: p.detach().full_tensor() for name, p in parts.items()}, failure(psg.per_sample_norm(loss), parts, ids, labels)


def traced(rank):
    with pytest.warns(psg.FallbackWarning, match=r"cannot be traced .*psg.distributed.all_reduce compares what"):
        return psg.jit(lambda w, x: all_reduce(psg.per_sample_norm(lambda w, x: w @ x)(w, x)), backend="eager")(f32(4), f32(3, 4) * rank)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, args=(path,), nprocs=len(SIZES))
    return [torch.load(path / str(rank), weights_only=False) for rank in range(len(SIZES))]


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _precision(_defaults):
    torch.set_default_dtype(torch.float64)


def whole():
    loss, params, ids, labels = problem()
    return psg.factored_grad(loss)(params, ids, labels), psg.clipped_grad(loss, 0.5)(params, ids, labels)


def test_clipped_sums_and_norms(found):
    _, out = whole()
    assert (out.clip_coef["head.weight"] < 1).any()
    for own in found:
        psg.testing.assert_trees_close(own["grads"], out.grads)
        psg.testing.assert_trees_close(own["norms"], out.norms)


def test_sums_and_the_state_of_the_optimizer_in_parts(found):
    loss, params, ids, labels = problem()
    whole = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    optimizer = torch.optim.Adam(whole.values(), lr=0.1)
    for _ in range(2):
        out = psg.clipped_grad(loss, 0.5)({name: p.detach() for name, p in whole.items()}, ids, labels)
        for name, p in whole.items():
            p.grad = out.grads[name]
        optimizer.step()
    for own in found:
        params, error = own["sharded"]
        psg.testing.assert_trees_close(params, {name: p.detach() for name, p in whole.items()}, per_sample=False)
        assert "is a DTensor, which several processes hold in parts; expected a whole tensor, .full_tensor()" in error


def test_factors(found):
    factored, _ = whole()
    for own in found:
        assert own["kinds"] == {"table.weight": Rows, "conv.weight": Conv, "conv.bias": Dense, "head.weight": Outer, "head.bias": Dense}
        psg.testing.assert_trees_close(own["gram"], psg.tree.gram(factored))


def test_losses_of_an_empty_batch_have_another_dtype(found):
    for own in found:
        assert own["losses"]["grads"].tolist() == [3, 3] and own["losses"]["loss"] == 3


def test_factors_of_other_shapes(found):
    """Each process has another length of sequences: factors with one position per token are materialised."""
    loss, params, ids, labels = problem()
    parts = [psg.per_sample_grad(loss)(params, ids[:3], labels[:3]), psg.per_sample_grad(loss)(params, ids[3:, :6], labels[3:])]
    for own in found:
        assert own["uneven kinds"] == {name: Outer if name == "head.weight" else Dense for name in parts[0]}
        psg.testing.assert_trees_close(own["uneven"], psg.tree.concat(parts))


def test_segments(found):
    """The segments are samples {0, 1}, {2} and {3, 4}. One process has more samples than segments, another has none of either."""
    factored, _ = whole()
    expected = psg.tree.materialize(psg.tree.segment_sum(factored, torch.tensor([0, 0, 1, 2, 2]), 3))
    for own in found:
        assert type(own["segments"]["table.weight"]) is Segments
        psg.testing.assert_trees_close(psg.tree.materialize(own["segments"]), expected)


def test_a_diagonal_that_all_samples_share_stays_one(found):
    gradients = psg.tree.materialize(whole()[0])["head.weight"]
    ranks = torch.tensor([0, 0, 0, 2, 2])[:, None, None]
    for own in found:
        assert own["scaled"].shared is not None and own["scaled apart"].shared is None
        psg.testing.assert_trees_close(own["scaled"].materialize(), gradients * diagonal())
        psg.testing.assert_trees_close(own["scaled apart"].materialize(), gradients * (diagonal() + ranks))


def test_sparse_sums(found):
    _, out = whole()
    for own in found:
        assert own["sparse"]["table.weight"].is_sparse
        psg.testing.assert_trees_close({name: sum.to_dense() for name, sum in own["sparse"].items()}, out.grads)


def test_dtypes(found):
    for own in found:
        mixed = own["mixed"]
        assert mixed["half"].tolist() == [258, 3] and mixed["half"].dtype == torch.bfloat16  # in bfloat16 256 + 1 is 256
        assert mixed["count"].item() == 3 and mixed["count"].dtype == torch.int64
        assert own["bytes"].item() == 600 and own["bytes"].dtype == torch.int64
        assert mixed["complex"].item() == 3 + 3j
        assert mixed["history"].tolist() == [6, 6] and not mixed["history"].requires_grad
        assert own["nothing"]["a"].shape == (0, 3)


def test_all_processes_agree(found):
    for own in found[1:]:
        assert all(torch.equal(own["noisy"][name], noisy) for name, noisy in found[0]["noisy"].items())
        assert torch.equal(own["gram"], found[0]["gram"])


def test_a_group(found):
    assert [own["pair"] if own["pair"] is None else own["pair"].item() for own in found] == [2, None, 2]
    for message in found[1]["outside"]:
        assert "this process is not in the group" in message


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_raised_by_all(found, name):
    for rank, own in enumerate(found):
        assert re.match(rf"psg\.distributed\.{REFUSED[name][0](rank).__name__}(:|,) {REFUSED[name][2]}", own["refused"][name])


def test_trees_that_differ_in_what_is_not_sent(found):
    """The order of a dict's keys, the addresses of keys, and of what psg registers with a dataclass."""
    for own in found:
        assert {key: total.item() for key, total in own["keys in any order"].items()} == {"a": 3 * ord("a"), "b": 3 * ord("b")}
        assert [total.item() for total in own["objects as keys"]] == [3, 3]
        assert [samples.tolist() for samples in own["dataclass"]] == [[0, 1, 2], [1, 1, 1]]


def test_a_sum_inside_of_jit_is_not_traced(found):
    """The graph did not wait for the sum: processes went on with their own numbers."""
    for own in found:
        assert own["traced"].tolist() == [6, 6, 6]


def test_a_collective_of_torch_s_own_inside_of_jit_is_not_traced(alone):
    """Nor did it wait for these."""

    def step(w, x):
        norms = psg.per_sample_norm(lambda w, x: w @ x)(w, x)
        dist.all_reduce(norms)
        return norms

    fast = psg.jit(step, backend="eager")
    w, x = torch.ones(2), torch.ones(3, 2)
    with pytest.warns(psg.FallbackWarning, match="c10d.allreduce_.*would not wait for its end"):
        assert torch.equal(fast(w, x), step(w, x))


def test_a_clipped_gradient_as_a_whole_has_no_sum(alone):
    out = psg.clipped_grad(lambda w, x: (w * x).sum(), 1.0)(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(psg.InputError, match="got a ClippedGrad, .*pass its grads"):
        psg.distributed.all_reduce(out)


@pytest.mark.parametrize("function", [psg.distributed.all_reduce, psg.distributed.all_gather])
def test_not_set_up(function):
    with pytest.raises(psg.InputError, match="init_process_group"):
        function(torch.ones(2))


@pytest.mark.parametrize("tree", [{}, {"a": 1.0}])
def test_what_has_neither_sums_nor_samples(tree, alone):
    with pytest.raises(psg.InputError, match=r"no leaves|tree\['a'\] is a float"):
        psg.distributed.all_reduce(tree)
    with pytest.raises(psg.InputError, match="expected tensors"):
        psg.distributed.all_gather(tree)


@pytest.mark.parametrize("function", [psg.distributed.all_reduce, psg.distributed.all_gather])
def test_eight_bits_are_not_sent(function, alone):
    with pytest.raises(psg.InputError, match=r"tree\['w'\] is of dtype torch\.float8_e5m2"):
        function({"w": torch.ones(2).to(torch.float8_e5m2)})


@pytest.mark.parametrize("factor", [Dense(torch.ones(3, 2)), Outer(torch.ones(3, 1, 2), torch.ones(3, 1, 4))])
def test_factors_have_no_sum(factor, alone):
    """The tensors of a factor add up to no factor of the sum."""
    with pytest.raises(psg.InputError, match=rf"tree\['w'\] is an? {type(factor).__name__}"):
        psg.distributed.all_reduce({"b": torch.ones(2), "w": factor})
