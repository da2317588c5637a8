"""Every case of the table against the loop, and the properties that a per-sample gradient must have."""

import warnings

import pytest
import torch
from agreement import assert_agrees, cut, floor, samples, summed
from cases import N, each_case, falling

import psg
from psg._trees import flatten, unflatten
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad, reference_norm, reference_weighted_sum
from psg.testing._loop import tree_map


def only_grads(result, problem):
    return result[0] if problem.options.get("has_aux") else result


def gradients(problem, **options):
    return only_grads(psg.per_sample_grad(problem.fn, **problem.options, **options)(*problem.args, **problem.shared), problem)


def oracle(problem):
    return only_grads(loop_grad(problem.fn, **problem.options)(*problem.args, **problem.shared), problem)


def runs_on_capture(case):
    return not case.not_capture


# --- every case against the loop ----------------------------------------------------------------------------


@each_case()
def test_equals_the_loop(case, device):
    with falling(case.not_capture):
        assert_agrees(case.build(device))


@each_case()
def test_rules_disabled_equals_the_loop(case, device):
    if case.vmap_wrong:
        pytest.skip(case.vmap_wrong)
    with falling(case.not_vmap):
        assert_agrees(case.build(device), rules=False)


@each_case(runs_on_capture)
def test_method_capture(case, device):
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="capture"), oracle(problem), name="grads")


@each_case(runs_on_capture)
def test_data_that_the_samples_share(case, device):
    """What does not depend on the sample may be computed once: here every sample's gradient is a multiple of a common one."""
    problem = samples(case.build(device), [0])
    one = cut(problem)
    args = unflatten(one.spec, [leaf if dim is None else leaf.select(dim, 0) for leaf, dim in one.pairs()])
    argnums = problem.options.get("argnums", 0)

    def fn(scale, *args):
        loss = problem.fn(*args, **problem.shared)
        return scale * (loss[0] if problem.options.get("has_aux") else loss)

    behind = argnums + 1 if isinstance(argnums, int) else tuple(k + 1 for k in argnums)
    scale = torch.arange(1.0, N + 1, device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="An output with one or more elements was resized")  # torch's prelu under vmap
        grads = psg.per_sample_grad(fn, behind, in_dims=(0, *(None for _ in args)))(scale, *args)
    expected = tree_map(lambda grad: scale.reshape(N, *grad.ndim * [1])[:, 0] * grad, oracle(problem))
    assert_trees_close(grads, expected, name="grads")


@each_case(lambda case: not case.not_vmap)
def test_method_vmap(case, device):
    if case.vmap_wrong:
        pytest.skip(case.vmap_wrong)
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="vmap"), oracle(problem), name="grads")


@each_case()
def test_method_loop(case, device):
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="loop"), oracle(problem), name="grads")


@each_case()
def test_arguments_are_left_alone(case, device):
    problem = case.build(device)
    before = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, problem.args)
    with falling(case.not_capture):
        gradients(problem)
    for now, then in zip(flatten(problem.args)[0], flatten(before)[0], strict=True):
        assert not isinstance(now, torch.Tensor) or torch.equal(now, then)


@each_case(lambda case: case.not_capture)
def test_method_capture_does_not_fall(case, device):
    problem = case.build(device)
    with pytest.raises((psg.PsgError, RuntimeError)):  # the error is torch's or psg's; test_ladder has their texts
        gradients(problem, method="capture")


# --- properties, on every case that the capture pass runs -----------------------------------------------------


@each_case(runs_on_capture)
def test_no_samples(case, device):
    problem = samples(case.build(device), [])
    found = gradients(problem)
    assert_trees_close(found, oracle(problem), name="grads")
    if not problem.options.get("has_aux"):
        assert_agrees(problem)


@each_case(runs_on_capture)
def test_one_sample(case, device):
    assert_agrees(samples(case.build(device), [1]))


@each_case(runs_on_capture)
def test_permuted_samples_give_permuted_gradients(case, device):
    problem = case.build(device)
    order = [2, 0, 1]
    expected = tree_map(lambda leaf: leaf[order], gradients(problem))
    assert_trees_close(gradients(samples(problem, order)), expected, name="grads")


@each_case(runs_on_capture)
def test_another_sample_leaves_a_row_untouched(case, device):
    problem = case.build(device)
    before, after = gradients(problem), gradients(samples(problem, [0, 0, 2]))
    for index in (0, 2):
        kept = tree_map(lambda leaf: leaf[index], before)  # noqa: B023
        assert_trees_close(tree_map(lambda leaf: leaf[index], after), kept, name="grads", per_sample=False)  # noqa: B023


READS_ITS_LAYOUT = {
    "derived: complex numbers",
    "leak: as_strided of a parameter",
    "leak: is_contiguous of a memory format",
    "leak: parameter seen as complex",
}


def with_gaps(tensor):
    """The same entries with others between them, which nothing may read."""
    others = torch.full_like(tensor, torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
    return torch.stack([tensor, others], -1)[..., 0]


def sample_by_sample(tensor):
    """The same entries, with dimension 0 innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim > 1 else tensor


@each_case(lambda case: not case.not_capture and case.name not in READS_ITS_LAYOUT)
@pytest.mark.parametrize("laid_out", [with_gaps, sample_by_sample])
def test_memory_layouts_change_nothing(case, laid_out, device):
    problem = case.build(device)
    args = tree_map(lambda leaf: laid_out(leaf) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided else leaf, problem.args)
    assert_trees_close(gradients(problem._replace(args=args)), oracle(problem), name="grads")


NOT_UNDER_VMAP = {
    "data dependent branch",
    "embedding scale_grad_by_freq and padding_idx",
    "embedding scale_grad_by_freq",
    "leak: as_strided of a slice",
    "leak: as_strided of a transposed activation",
    "leak: as_strided of an activation",
    "leak: distances between parameters",
    "memory format: read by as_strided",
    "old style autograd function",
}
REFUSED = {
    "members": NOT_UNDER_VMAP
    | {"branch on a parameter", "leak: as_strided of a parameter", "leak: matrix assembled in place from parameters"},
    "samples": NOT_UNDER_VMAP | {"leak: in-place write of the sample into a derived parameter"},
}


@each_case(runs_on_capture)
@pytest.mark.parametrize("over", ["members", "samples"])
def test_under_vmap(case, over, device):
    """Each member of stacked parameters has its own gradients; and so has each sample, where psg gets a batch of it alone."""
    problem = case.build(device)
    batch = cut(problem)
    leaves, dims = zip(*batch.pairs(), strict=True)
    if over == "members":
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and dims[i] is None]
    else:
        places = [i for i, dim in enumerate(dims) if dim is not None]

    def own(*tensors):
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor if over == "members" else tensor.unsqueeze(dims[i])
        return tuple(flatten(gradients(problem._replace(args=tuple(unflatten(batch.spec, filled)))))[0])

    given = [torch.stack([leaves[i], leaves[i].flip(0)]) if over == "members" else leaves[i] for i in places]
    run = torch.func.vmap(own, in_dims=0 if over == "members" else tuple(dims[i] for i in places))
    if case.name in REFUSED[over]:
        with pytest.raises((psg.PsgError, RuntimeError)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(*given)
        return
    found = [grad[0] if over == "members" else grad[:, 0] for grad in run(*given)]
    assert_trees_close(found, flatten(oracle(problem))[0], name="grads")


@each_case(runs_on_capture)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7])
def test_chunks_change_nothing(case, chunk_size, device):
    problem = case.build(device)
    expected = oracle(problem)
    assert_trees_close(gradients(problem, chunk_size=chunk_size), expected, name="grads")
    factored = only_grads(psg.factored_grad(problem.fn, chunk_size=chunk_size, **problem.options)(*problem.args, **problem.shared), problem)
    assert_trees_close(psg.tree.norm(factored), reference_norm(expected), name="norm")


@each_case(runs_on_capture)
def test_a_masked_sample_contributes_exactly_zero(case, device):
    problem = case.build(device)
    clipped = psg.clipped_grad(problem.fn, float("inf"), **problem.options)
    mask = torch.tensor([True, False, True], device=device)
    problem = samples(problem, [0, 1, 2])  # one memory layout for all calls
    clipped(*problem.args, mask=mask, **problem.shared)  # the first may run otherwise than later ones
    out = clipped(*problem.args, mask=mask, **problem.shared)
    assert not out.norms[1] and not out.values[1]
    summed(out.grads, reference_weighted_sum(oracle(problem), mask.to(out.norms.dtype)), "grads")
    # Exactly: what the masked sample holds changes no bit of the sum, where kernels add in one order (on accelerators some do not).
    other = samples(problem, [0, 2, 2])
    again = clipped(*other.args, mask=mask, **problem.shared)
    off = 0 if device.type == "cpu" else floor(tree_map(lambda own: own[None], out.grads))
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=off), again.grads, out.grads)


@each_case(runs_on_capture)
def test_linear_in_the_loss(case, device):
    problem = case.build(device)
    if problem.options.get("has_aux"):
        doubled = lambda *args, **shared: (lambda value, aux: (-2.5 * value, aux))(*problem.fn(*args, **shared))  # noqa: E731
    else:
        doubled = lambda *args, **shared: -2.5 * problem.fn(*args, **shared)  # noqa: E731
    expected = tree_map(lambda leaf: -2.5 * leaf, gradients(problem))
    assert_trees_close(gradients(problem._replace(fn=doubled)), expected, name="grads")


@each_case(runs_on_capture)
def test_clipped_sample_has_at_most_the_clip_norm(case, device):
    problem = case.build(device)
    norms = reference_norm(oracle(problem))
    clip_norm = norms.median().item()
    for i in range(N):
        one = samples(problem, [i])
        out = psg.clipped_grad(one.fn, clip_norm, **one.options)(*one.args, **one.shared)
        length = reference_norm(tree_map(lambda leaf: leaf[None], out.grads)).item()
        assert length <= clip_norm * (1 + 4 * torch.finfo(norms.dtype).eps)
        assert length == pytest.approx(min(norms[i].item(), clip_norm), rel=psg.testing.default_rtol(norms.dtype))


def test_values_and_batch_sizes_of_the_cases(device):
    # Every case of the table must have N samples and finite losses, or the tests above would check less than they say.
    for case in each_case().args[1]:
        problem = case.build(device)
        assert cut(problem).n == N, case.name
        values, _ = loop_value_and_grad(problem.fn, **problem.options)(*problem.args, **problem.shared)
        values = values[0] if problem.options.get("has_aux") else values
        assert values.shape == (N,) and values.isfinite().all(), case.name
