"""Several processes give the results of one process that has all their samples."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import psg
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


def failure(function, *args):
    try:
        function(*args)
    except psg.InputError as error:
        return str(error)
    raise AssertionError("no error")


def work(rank, path):
    """Saves the results of one process, which the tests read."""
    warnings.simplefilter("error", psg.FallbackWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=len(SIZES))
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
        "one is wrong": failure(psg.distributed.all_gather, (torch.ones(2), torch.ones(3 if rank == 1 else 2))),
        "one is other": failure(psg.distributed.all_gather, torch.ones(2, 3 + (rank == 2))),
        "flag": failure(psg.distributed.all_reduce, torch.tensor(True)),
        "pair": psg.distributed.all_reduce(torch.tensor(rank), group=pair) if rank != 1 else None,
    }
    torch.save(found, f"{path}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, args=(path,), nprocs=len(SIZES))
    return [torch.load(path / str(rank), weights_only=False) for rank in range(len(SIZES))]


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


def test_errors_are_raised_by_all(found):
    for own in found:
        assert "not so in processes [1]" in own["one is wrong"]
        assert "processes [2] have trees of another structure" in own["one is other"]
        assert "tree is of dtype torch.bool" in own["flag"]


def test_a_clipped_gradient_as_a_whole_has_no_sum():
    out = psg.clipped_grad(lambda w, x: (w * x).sum(), 1.0)(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(psg.InputError, match="got a ClippedGrad, .*pass its grads"):
        psg.distributed.all_reduce(out)


@pytest.mark.parametrize("function", [psg.distributed.all_reduce, psg.distributed.all_gather])
def test_not_set_up(function):
    with pytest.raises(psg.InputError, match="init_process_group"):
        function(torch.ones(2))


@pytest.mark.parametrize("tree", [{}, {"a": 1.0}, torch.eye(2).to_sparse()])
def test_what_has_no_sum(tree):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(psg.InputError, match=r"no leaves|tree\['a'\] is a float|tree is a sparse"):
            psg.distributed.all_reduce(tree)
        if isinstance(tree, dict):
            with pytest.raises(psg.InputError, match="expected tensors"):
                psg.distributed.all_gather(tree)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("factor", [Dense(torch.ones(3, 2)), Outer(torch.ones(3, 1, 2), torch.ones(3, 1, 4))])
def test_factors_have_no_sum(factor):
    """The tensors of a factor add up to no factor of the sum."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(psg.InputError, match=rf"tree\['w'\] is a {type(factor).__name__}"):
            psg.distributed.all_reduce({"b": torch.ones(2), "w": factor})
    finally:
        dist.destroy_process_group()
