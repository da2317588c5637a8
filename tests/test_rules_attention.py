"""Attention over drawn shapes and options: its rule folds the samples into the batch that kernels know."""

import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem, score
from hypothesis import given
from hypothesis import strategies as st

from psg.testing import tensors


@st.composite
def attention_problems(draw):
    """Self and cross attention; masks of every shape that broadcasts, boolean or added, shared or a sample's own."""
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
