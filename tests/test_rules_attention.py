"""Attention over drawn shapes and options: its rule folds the samples into the kernels' batch dimension."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, parameters, score
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import psg
from psg.rules.attention import attention_in_parts
from psg.testing import assert_trees_close, loop_grad, tensors


@st.composite
def attention_problems(draw):
    """Self and cross attention; masks of every shape that broadcasts, boolean or added, shared or different for each sample."""
    n, t, s = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, e, f = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lead = draw(st.sampled_from([(), (1,), (2,), (2, 1)]))
    grouped = draw(st.booleans())
    key_heads = 1 if grouped else heads
    options = draw(st.fixed_dictionaries({}, optional={"scale": st.sampled_from([0.5, 2.0])}))
    if grouped:
        options["enable_gqa"] = True
    kind = draw(st.sampled_from(["none", "causal", "boolean", "added"]))
    shared = draw(st.booleans())
    mask = None
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = draw(st.sampled_from([(t, s), (1, s), (1, t, s), (heads, t, s), (*lead, 1, t, s), (*lead, heads, t, s)]))
        mask = draw(tensors(shape if shared else (n, *shape)))
        if kind == "boolean":
            mask = mask > 0
            mask[..., 0] = True  # a row without any source is 0/0 in torch itself
    params = {
        name: draw(tensors((heads_of * width, 4))) for name, heads_of, width in (("q", heads, e), ("k", key_heads, e), ("v", key_heads, f))
    }

    def fn(p, x, memory, mask):
        def split(name, source, count):
            return F.linear(source, p[name]).unflatten(-1, (count, -1)).transpose(-2, -3)

        q, k, v = split("q", x, heads), split("k", memory, key_heads), split("v", memory, key_heads)
        return score(F.scaled_dot_product_attention(q, k, v, mask, **options))

    args = (params, draw(tensors((n, *lead, t, 4))), draw(tensors((n, *lead, s, 4))), mask)
    return Problem(fn, args, options={"in_dims": (None, 0, 0, None if shared or mask is None else 0)})


@given(problem=attention_problems(), rules=st.sampled_from([True, False]))
def test_attention(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=attention_problems())
def test_derivatives_of_results(problem, device):
    assert_derivatives_agree(on(problem, device))


@given(
    n=st.integers(0, 3),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    groups=st.sampled_from([None, 1, 2]),
    kind=st.sampled_from(["none", "causal", "boolean", "added"]),
    scale=st.sampled_from([None, 0.5, -1.0]),
    seed=st.integers(0, 999),
)
def test_attention_written_out(n, sizes, groups, kind, scale, seed, device):
    """Its values and its derivatives, of first and second order, are those of torch's own unfused kernel; masks may leave rows empty."""
    torch.manual_seed(seed)
    t, s, e, f = sizes
    heads = 2 if groups is None else 2 * groups
    q, k, v = (torch.randn(n, *shape, device=device) for shape in ((heads, t, e), (2, s, e), (2, s, f)))
    mask = {"boolean": torch.randn(t, s, device=device) > 0, "added": torch.randn(t, s, device=device)}.get(kind)
    if kind == "added":
        mask = mask.masked_fill(torch.randn(t, s, device=device) > 0.5, -torch.inf)
    options = {"scale": scale, "is_causal": kind == "causal", "enable_gqa": groups is not None}

    def orders(attention):
        own = [side.clone().requires_grad_() for side in (q, k, v)]
        output = attention(*own, mask, **options)
        first = torch.autograd.grad(output.sin().sum(), own, create_graph=True)
        return [output.detach(), *first, *torch.autograd.grad(sum(slope.sin().sum() for slope in first), own)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = orders(F.scaled_dot_product_attention)
    assert_trees_close(orders(attention_in_parts), expected, atol=1e-12, per_sample=False)


@given(n=st.integers(0, 3), t=st.integers(1, 4), seed=st.integers(0, 99))
def test_unbatched_queries(n, t, seed, device):
    torch.manual_seed(seed)
    w, x = torch.randn(3, 4, 4, device=device), torch.randn(n, t, 4, device=device)

    def fn(w, x):
        return score(F.scaled_dot_product_attention(*(F.linear(x, part) for part in w)))

    assert_agrees(Problem(fn, (w, x)))


@given(n=st.integers(0, 3), seed=st.integers(0, 99))
def test_queries_that_are_parameters(n, seed, device):
    # Learned queries, as pooling by attention has: the same for every sample.
    torch.manual_seed(seed)
    params = {"q": torch.randn(1, 2, 3, 4, device=device), "kv": torch.randn(2, 8, 4, device=device)}

    def fn(p, x):
        k, v = (F.linear(x, part).unflatten(-1, (2, 4)).transpose(0, 1)[None] for part in p["kv"])
        return score(F.scaled_dot_product_attention(p["q"], k, v))

    assert_agrees(Problem(fn, (params, torch.randn(n, 5, 4, device=device))))


@given(sizes=st.tuples(*[st.integers(1, 2)] * 5), n=st.integers(0, 3), seed=st.integers(0, 99))
def test_keys_that_broadcast(sizes, n, seed, device):
    """Along any dimensions before the positions, which are those of the heads and two before."""
    torch.manual_seed(seed)
    w, x = torch.randn(4, device=device), torch.randn(n, 2, 2, 2, 3, 4, device=device)
    key, value = torch.randn(n, *sizes[:3], 2, 4, device=device), torch.randn(n, 1, *sizes[3:], 2, 4, device=device)
    fn = lambda w, *tensors: score(F.scaled_dot_product_attention(w * tensors[0], *tensors[1:]))  # noqa: E731
    assert_agrees(Problem(fn, (w, x, key, value)))


def draw_boolean(draw, shape, keep_first=True):
    """A boolean tensor; `keep_first` leaves one False in every row, since a row without any source is 0/0 in torch itself."""
    mask = draw(tensors(shape)) > 0
    if keep_first:
        mask[..., 0] = False
    return mask


@st.composite
def learned_mask_problems(draw):
    """A mask made of parameters: relative positions, one a head or one for all, alone or together with data."""
    n, t, s = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, e = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lead = draw(st.sampled_from([(), (1,), (2,)]))
    grouped = draw(st.booleans())
    shape = draw(st.sampled_from([(t, s), (1, s), (t, 1), (heads, t, s), (heads, 1, s), (*lead, 1, t, s), (*lead, heads, t, s)]))
    of_data = draw(st.booleans())
    params = {"bias": draw(tensors(shape)), "q": draw(tensors((heads * e, 2))), "kv": draw(tensors(((1 if grouped else heads) * e, 2)))}

    def fn(p, x, memory):
        q = F.linear(x, p["q"]).unflatten(-1, (heads, e)).transpose(-2, -3)
        k = F.linear(memory, p["kv"]).unflatten(-1, (-1, e)).transpose(-2, -3)
        mask = p["bias"].sigmoid() * (memory.mean() if of_data else 1)
        return score(F.scaled_dot_product_attention(q, k, k.tanh(), mask, enable_gqa=grouped))

    return Problem(fn, (params, draw(tensors((n, *lead, t, 2))), draw(tensors((n, *lead, s, 2)))))


@given(problem=learned_mask_problems(), rules=st.sampled_from([True, False]))
def test_a_mask_made_of_parameters(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@st.composite
def broadcast_problems(draw):
    """Queries, keys and values whose leading dimensions differ, down to none at all."""
    n, t, s = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    full = draw(st.sampled_from([(), (2,), (2, 3), (1, 2, 2)]))
    causal = draw(st.booleans())

    def lead():
        sizes = tuple(draw(st.sampled_from([1, size])) for size in full)
        return sizes[draw(st.integers(0, len(sizes))) :]

    params = {"q": draw(tensors((3, 2))), "kv": draw(tensors((2, 3, 2)))}
    mask_lead = lead()
    mask = None if causal or draw(st.booleans()) else draw(tensors((n, *mask_lead, t, s)))

    def fn(p, x, y, z, mask):
        q, k, v = F.linear(x, p["q"]), F.linear(y, p["kv"][0]), F.linear(z, p["kv"][1])
        return score(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))

    # torch lets a mask have no more dimensions than the queries.
    x = draw(tensors((n, *(full if mask is not None else lead()), t, 2)))
    args = (params, x, draw(tensors((n, *lead(), s, 2))), draw(tensors((n, *lead(), s, 2))), mask)
    return Problem(fn, args, options={"in_dims": (None, 0, 0, 0, None if mask is None else 0)})


@given(problem=broadcast_problems(), rules=st.sampled_from([True, False]))
def test_leading_dimensions_that_broadcast(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_causal_attention_with_a_scale_that_is_not_positive(lead, scale, device):
    # The fused kernel multiplies the -inf of its mask by the scale; where torch uses it for one sample, a loop is wrong too.
    w, x = torch.randn(4, 4, device=device), torch.randn(3, *lead, 5, 4, device=device)

    def attention(**mask):
        return lambda w, x: score(F.scaled_dot_product_attention(F.linear(x[..., :3, :], w), x, x.sin(), scale=scale, **mask))

    expected = loop_grad(attention(attn_mask=torch.ones(3, 5, device=device).tril() > 0))(w, x)
    assert expected.isfinite().all()
    assert_trees_close(psg.per_sample_grad(attention(is_causal=True), method="capture")(w, x), expected)


@pytest.mark.parametrize("lead", [(), (1,), (2, 1)])
@pytest.mark.parametrize("mask", ["none", "boolean", "learned"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_draws_as_a_loop_does(lead, mask, randomness, device):
    params = {"qkv": torch.randn(3, 4, 4, device=device), "bias": torch.randn(2, 5, 5, device=device)}
    x = torch.randn(3, *lead, 5, 4, device=device)

    def fn(p, x):
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 2)).transpose(-2, -3) for w in p["qkv"])
        masks = {"none": None, "boolean": torch.ones(5, 5, device=x.device).tril() > 0, "learned": p["bias"]}
        return score(F.scaled_dot_product_attention(q, k, v, masks[mask], dropout_p=0.5))

    found = {}
    for method in ("auto", "loop"):
        torch.manual_seed(0)
        found[method] = psg.per_sample_grad(fn, randomness=randomness, method=method)(params, x)
    if device.type == "cpu":  # on other devices a batch draws other numbers than single samples
        assert_trees_close(found["auto"], found["loop"])
    rows = found["auto"]["qkv"]
    assert rows.isfinite().all() and not torch.equal(rows[0], rows[1])


# Modules


@st.composite
def module_problems(draw):
    """nn.MultiheadAttention with every option."""
    n, t, s = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = draw(st.integers(1, 2))
    width = heads * draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["self", "memory", "all different"]))
    own = {}
    if kind != "self" and draw(st.booleans()):
        own = {"kdim": draw(st.integers(1, 3)), "vdim": draw(st.integers(1, 3))}
    switches = {name: draw(st.booleans()) for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    module = torch.nn.MultiheadAttention(width, heads, **own, **switches)
    for parameter in module.parameters():
        parameter.data = draw(tensors(parameter.shape))
    module.train(draw(st.booleans()))
    batched = draw(st.booleans())
    weights = draw(st.sampled_from([{"need_weights": False}, {}, {"average_attn_weights": False}]))
    if kind == "self":
        s = t
    masks = {}
    if draw(st.booleans()):
        padding = draw_boolean(draw, (n, s))
        masks["key_padding_mask"] = padding if draw(st.booleans()) else padding.to(torch.get_default_dtype()) * -2
    shape = draw(st.sampled_from([None, (t, s), (heads, t, s)]))
    if shape is not None:
        mask = draw_boolean(draw, shape)
        same_kind = masks.get("key_padding_mask", mask).dtype == torch.bool
        masks["attn_mask"] = mask if same_kind else mask.to(torch.get_default_dtype()) * -3

    def fn(p, x, memory, other, masks):
        def arrange(tensor):  # one sample, with a batch dimension or without
            return tensor if not batched else tensor[None] if module.batch_first else tensor[:, None]

        q = arrange(x)
        k = q if kind == "self" else arrange(memory)
        v = k if kind != "all different" and not own else arrange(other)
        given = {**masks, **({"key_padding_mask": masks["key_padding_mask"][None]} if batched and "key_padding_mask" in masks else {})}
        out, attention = functional_call(module, p, (q, k, v), {**given, **weights})
        return score(out) + (0 if attention is None else score(attention))

    x = draw(tensors((n, t, width)))
    memory = draw(tensors((n, s, own.get("kdim", width))))
    other = draw(tensors((n, s, own.get("vdim", width))))
    dims = {name: 0 if name == "key_padding_mask" else None for name in masks}
    return Problem(fn, (parameters(module), x, memory, other, masks), options={"in_dims": (None, 0, 0, 0, dims)})


@given(problem=module_problems(), rules=st.sampled_from([True, False]))
def test_multihead_attention(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


def transformer_cases():
    options = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}
    for name, kind in (("encoder", torch.nn.TransformerEncoderLayer), ("decoder", torch.nn.TransformerDecoderLayer)):
        for switches in ({}, {"norm_first": True}, {"batch_first": True}, {"activation": "gelu"}, {"bias": False}):
            yield pytest.param(lambda kind=kind, switches=switches: kind(**options, **switches), id=f"{name}-{'-'.join(switches)}")
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2}
    yield pytest.param(lambda: torch.nn.Transformer(**options, **layers), id="transformer")
    yield pytest.param(lambda: torch.nn.Transformer(**options, **layers, batch_first=True, norm_first=True), id="transformer-batch-first")
    layer = lambda: torch.nn.TransformerEncoderLayer(**options, batch_first=True)  # noqa: E731
    for nested in (True, False):
        yield pytest.param(
            lambda nested=nested: torch.nn.TransformerEncoder(layer(), 2, enable_nested_tensor=nested), id=f"encoder-nested-{nested}"
        )


# torch warns of this when it builds such a module.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("build", list(transformer_cases()))
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_layers(build, training, masked, device, monkeypatch):
    module = build().to(device).train(training)
    inner = getattr(module, "self_attn", None) or (module.encoder if hasattr(module, "encoder") else module).layers[0].self_attn
    first = inner.batch_first
    two_inputs = isinstance(module, (torch.nn.TransformerDecoderLayer, torch.nn.Transformer))
    causal = torch.nn.Transformer.generate_square_subsequent_mask(4, device=device, dtype=torch.get_default_dtype())

    def fn(p, x, y, padding):
        inputs = [tensor[None] if first else tensor[:, None] for tensor in ((x, y) if two_inputs else (x,))]
        masks = {}
        if masked:
            if isinstance(module, torch.nn.Transformer):
                masks = {"src_key_padding_mask": padding[None], "tgt_mask": causal, "tgt_is_causal": True}
            elif two_inputs:
                masks = {"tgt_key_padding_mask": padding[None], "tgt_mask": causal}
            else:
                masks = {"src_key_padding_mask": padding[None]}
        return score(functional_call(module, p, tuple(inputs), masks))

    padding = torch.arange(4, device=device) >= torch.tensor([[4], [2], [3]], device=device)
    padding = torch.where(padding, -torch.inf, 0.0) if two_inputs else padding
    x, y = torch.randn(2, 3, 4, 4, device=device)
    problem = Problem(fn, (parameters(module), x, y, padding))
    assert_agrees(problem)
    as_large(monkeypatch)  # small weights run without rules from the second call on
    for leaf in psg.explain(fn)(*problem.args).leaves:
        ruled = {use for use in leaf.uses if use.endswith(": rule")}
        # A decoder projects queries and memory with parts of one matrix.
        assert ruled and set(leaf.uses) <= ruled | {"split: derived", "unflatten: derived", "transpose: derived"}, leaf


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (1, 1, 3, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_scores_that_are_not_finite(shape, place, broken, device):
    def fn(w, q, k, v):
        return F.linear(F.scaled_dot_product_attention(q, k, v), w).sin().sum()

    w, sides = torch.randn(4, 4, device=device), {name: torch.randn(3, *shape, device=device) for name in ("query", "key", "value")}
    sides[place][1].flatten()[: None if place == "key" else 1] = broken  # whole rows of scores
    # Keys and values that broadcast: torch, too, runs these unfused.
    sides["key"], sides["value"] = (sides[name][:, :1] if len(shape) == 4 else sides[name] for name in ("key", "value"))
    expected = psg.per_sample_value_and_grad(fn, method="loop")(w, *sides.values())
    assert_trees_close(psg.per_sample_value_and_grad(fn, method="capture")(w, *sides.values()), expected)
