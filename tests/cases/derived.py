"""Parameters that reach an op through other ops, or without any rule."""

from functools import partial

import torch
import torch.linalg as L
import torch.nn.functional as F
import torch.special as S
from torch import nn
from torch.func import functional_call

from cases._table import CASES, Case, N, Problem, case, ids, module_case, normal, op_case, parameters, score

# --- derived parameters -------------------------------------------------------------------------------------


def derived(name, make, **params):
    """Add a row in which a linear layer's weight is computed from parameters alone."""

    def recipe():
        weights = {key: normal(*shape) for key, shape in params.items()}
        return Problem(lambda p, x: score(F.linear(x, make(**p))), (weights, normal(N, 5, 3)))

    CASES.append(Case(f"derived: {name}", recipe))


derived("view", lambda w: w.view(4, 3), w=(12,))
derived("reshape and transpose", lambda w: w.reshape(3, 4).t(), w=(2, 6))
derived("mT of permute", lambda w: w.permute(2, 0, 1)[0].mT, w=(3, 4, 1))
derived("cast there and back", lambda w: w.to(torch.complex128).real.to(w.dtype) * 2, w=(4, 3))
derived("low rank update", lambda w, a, b: w + 0.5 * (b @ a), w=(4, 3), a=(2, 3), b=(4, 2))
derived("chunk", lambda w: w.chunk(2)[1], w=(8, 3))
derived("split", lambda w: w.split([1, 4, 2])[1], w=(7, 3))
derived("unbind", lambda w: w.unbind(1)[0], w=(4, 2, 3))
derived("index", lambda w: w[1], w=(2, 4, 3))
derived("slice", lambda w: w[2:, ::2], w=(6, 6))
derived("gather of rows", lambda w: w[torch.tensor([0, 2, 2, 1], device=w.device)], w=(3, 3))
derived("expand", lambda w: w.expand(4, 3), w=(1, 3))
derived("cat", lambda a, b: torch.cat([a, b], 1), a=(4, 1), b=(4, 2))
derived("stack", lambda a, b: torch.stack([a, b]), a=(3,), b=(3,))
derived("weight times mask", lambda w: w * torch.ones(4, 3, device=w.device).tril(), w=(4, 3))
derived("norm and direction", lambda g, v: g * v / torch.linalg.vector_norm(v, dim=1, keepdim=True), g=(4, 1), v=(4, 3))
derived("exponential of skew", lambda w: torch.linalg.matrix_exp(w - w.T), w=(3, 3))
derived("scalar times constant", lambda s: s * torch.ones(4, 3, device=s.device), s=())
derived("softmax", lambda w: w.softmax(-1), w=(4, 3))


def spectral(w):
    with torch.no_grad():
        u = F.normalize(torch.ones_like(w[:, 0]), dim=0)
        for _ in range(3):
            v = F.normalize(torch.mv(w.t(), u), dim=0)
            u = F.normalize(torch.mv(w, v), dim=0)
    return w / torch.dot(u, torch.mv(w, v))


def quantised(w):
    step = w.abs().max().detach() / 7
    return w + ((w / step).round().clamp(-8, 7) * step - w).detach()


def polynomials(w):
    several = w.sin() * w.cos() + w.tan().atan() - w.sinh() / w.cosh() + w.erf() * torch.special.expit(w) + torch.hypot(w, w.exp())
    return several + torch.logaddexp(w, 2 * w) + torch.atan2(w, w.exp()) + torch.addcmul(w, w, w, value=0.5) + torch.nan_to_num(w)


derived("spectral norm", spectral, w=(4, 3))
derived("quantised, straight through", quantised, w=(4, 3))
derived("pruned by a mask of its own", lambda w: torch.where(w.abs() > w.abs().mean(), w, 0.0) * (w < 1), w=(4, 3))
derived("its norm, detached", lambda w: w / w.norm().detach() + w.detach() * w.sign(), w=(4, 3))
derived("pruned by the opposite of a mask", lambda w: w * ~(w.abs() < 0.5), w=(4, 3))
derived("largest entries", lambda w: w - w.max(1, keepdim=True).values + w.min() + w[:, w.sum(0).argmax()][:, None], w=(4, 3))
derived("elementwise functions", polynomials, w=(4, 3))
derived("orthogonal", lambda w: torch.matrix_exp(w.tril(-1) - w.tril(-1).mH)[:, :3], w=(4, 4))
derived("inverse", lambda w: torch.linalg.inv(w @ w.T + torch.eye(3).to(w)) + torch.linalg.solve(w + 4 * torch.eye(3).to(w), w), w=(3, 3))
derived("factorised", lambda w: torch.linalg.qr(w).Q + torch.linalg.cholesky(w.T @ w + torch.eye(3).to(w)).sum(), w=(4, 3))
derived("of its spectrum", lambda w: torch.fft.irfft(torch.fft.rfft(w, dim=1).conj() * (1 + w[:, :1]), n=3, dim=1), w=(4, 3))
derived("complex numbers", lambda w: torch.view_as_real(torch.view_as_complex(w) ** 2).flatten(1)[:, :3], w=(4, 2, 2))
derived("its trace and determinant", lambda w: w * w.trace() + torch.linalg.det(w) - torch.logdet(w @ w.T), w=(3, 3))


@case(name="derived: weight_norm parametrisation")
def _():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: orthogonal parametrisation")
def _():
    module = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley")
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: the result is used by a rule, outside it and returned")
def _():
    def fn(p, x):
        both = p["a"] @ p["b"]
        return score(F.linear(x, both)) + score(both * x.mean()) + both.square().sum()

    return Problem(fn, ({"a": normal(4, 2), "b": normal(2, 3)}, normal(N, 5, 3)))


@case(name="derived: convolution kernel standardised")
def _():
    def fn(p, x):
        weight = p["weight"]
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return score(F.conv2d(x, weight, p["bias"]))

    return Problem(fn, ({"weight": normal(4, 3, 2, 2), "bias": normal(4)}, normal(N, 3, 5, 5)))


# --- lifted only --------------------------------------------------------------------------------------------

op_case("bare parameters", lambda x, scale, shift: (x * scale.exp() + shift).tanh(), (5, 4), params={"scale": (4,), "shift": (5, 1)})
op_case("scalar parameter", lambda x, temperature: (x / temperature).softmax(-1), (4,), params={"temperature": ()})
op_case("prelu", F.prelu, (5, 4), params={"weight": (4,)})
op_case(
    "parameter without entries", lambda x, weight, empty: (x * weight).sum() + empty.sum(), (3,), params={"weight": (3,), "empty": (0, 2)}
)
module_case("prelu module", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3)), (2, 4, 4))


@case
def hypernetwork():
    # The weights of the second layer are an output of the first: they differ from sample to sample.
    def fn(p, x, y):
        generated = F.linear(x, p["weight"], p["bias"]).reshape(2, 4)
        return score(F.linear(y, generated))

    return Problem(fn, ({"weight": normal(8, 3), "bias": normal(8)}, normal(N, 3), normal(N, 5, 4)))


@case
def parameter_indexed_by_the_sample():
    return Problem(lambda p, i, x: score(p[i] * x), (normal(6, 3), ids(6, N, 2), normal(N, 3)))


@case
def parameters_compared_and_selected():
    return Problem(lambda p, x: score(torch.where(p["a"] > p["b"], p["a"] * x, p["b"])), ({"a": normal(4), "b": normal(4)}, normal(N, 4)))


@case
def class_token_and_positions():
    # As a vision transformer: a token of its own before the patches, positions added.
    def fn(p, x):
        patches = F.conv2d(x[None], p["patch"], stride=2).flatten(2).transpose(1, 2)
        tokens = torch.cat([p["token"].expand(1, -1, -1), patches], 1) + p["positions"]
        return score(F.layer_norm(tokens, (4,), p["scale"]))

    params = {"patch": normal(4, 1, 2, 2), "token": normal(1, 1, 4), "positions": normal(1, 5, 4), "scale": normal(4)}
    return Problem(fn, (params, normal(N, 1, 4, 4)))


@case
def parameters_iterated_and_stacked():
    def fn(p, x):
        rows = [F.linear(x, row[None]) for row in p["w"]]
        return score(torch.cat(rows)) + score(torch.stack([p["a"], x]))

    return Problem(fn, ({"w": normal(4, 3), "a": normal(3)}, normal(N, 3)))


@case
def parameter_by_keyword_and_position():
    def fn(p, x):
        y = F.linear(weight=p["w"], input=x, bias=p["b"])
        y = F.layer_norm(y, (4,), bias=p["c"])
        return score(torch.matmul(input=y, other=p["v"]))

    return Problem(fn, ({"w": normal(4, 3), "b": normal(4), "c": normal(4), "v": normal(4, 2)}, normal(N, 5, 3)))


class Scaled(torch.autograd.Function):
    """x w, with a rule of its own for w, which no function mode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent * w, 3 * cotangent * x  # not the derivative: the function's own rule counts


@case
def custom_autograd_function_with_a_vmap_rule():
    return Problem(
        lambda p, x: score(Scaled.apply(F.linear(x, p["a"]), p["w"])), ({"a": normal(4, 3), "w": normal(4)}, normal(N, 4, 3)[:, 0])
    )


# --- ops that are computed once -----------------------------------------------------------------------------
# By name, and what tells apart several of a name: of a parameter of shape [4, 4] with entries between 0.5 and 1.5.


def i(*numbers):
    return torch.tensor(numbers)


def eye(w):
    return torch.eye(4).to(w)


def spd(w):
    return w @ w.mT + eye(w)


def pair(w):
    """A batch of two matrices."""
    return torch.stack([w, w.square() - 0.3])


def wide(w):
    return w[:3]


def tall(w):
    return w[:, :3]


def clipped(u, s, v):
    """What does not depend on the signs of singular vectors."""
    return (u * s.clamp(max=2).unsqueeze(-2)) @ v


def each(module, names, call=lambda f, w: f(w), prefix=""):
    return {prefix + name: partial(call, getattr(module, name)) for name in names.split()}


COMPUTED_ONCE = {
    **each(torch, "absolute negative positive frac fix sinc deg2rad rad2deg exp2 log2 log10"),
    **each(torch, "arcsinh arctan lgamma digamma i0 signbit isposinf isneginf isreal conj_physical"),
    **each(torch, "nansum nanmean aminmax any all count_nonzero cov corrcoef msort trapezoid trapz"),
    **each(torch, "ravel rot90 fliplr flipud diagflat diag_embed atleast_1d atleast_2d atleast_3d"),
    **each(torch, "logit arcsin arccos arctanh erfinv", lambda f, w: f(w / 3)),
    **each(S, "entr erfcx exp2 expm1 log1p log_ndtr ndtr gammaln digamma psi", prefix="special_"),
    **each(S, "i0 i0e i1 i1e sinc round", prefix="special_"),
    **each(S, "erfinv logit ndtri", lambda f, w: f(w / 3), prefix="special_"),
    **each(S, "softmax log_softmax logsumexp", lambda f, w: f(w, 1), prefix="special_"),
    **each(F, "softsign tanhshrink softshrink hardshrink"),
    **each(torch, "multiply divide subtract fmax fmin copysign", lambda f, w: f(w, w.square())),
    **each(torch, "arctan2 logaddexp2 xlogy isclose isin logical_xor", lambda f, w: f(w, w.square())),
    **each(torch, "greater greater_equal less less_equal not_equal", lambda f, w: f(w, 1)),
    **each(torch, "fmod remainder float_power", lambda f, w: f(w, 0.3)),
    **each(torch, "median nanmedian mode sort argsort cummax", lambda f, w: f(w, dim=1)),
    **each(torch, "cummin logcumsumexp cumulative_trapezoid", lambda f, w: f(w, dim=0)),
    **each(torch, "quantile nanquantile", lambda f, w: f(w, 0.4, dim=1)),
    **each(torch, "column_stack row_stack dstack", lambda f, w: f([w, w.square()])),
    **each(torch, "hsplit vsplit unsafe_chunk unsafe_split", lambda f, w: f(w, 2)),
    **each(torch.fft, "fftshift ifftshift hfft rfftn", prefix="fft_"),
    "fft_irfftn": lambda w: torch.fft.irfftn(torch.fft.rfft(w)),
    "fft_ihfft": lambda w: torch.fft.ihfft(w).abs(),
    "stft": lambda w: torch.stft(w.flatten(), 4, return_complex=True, window=torch.ones(4)).abs(),
    "istft": lambda w: torch.istft(torch.stft(w.flatten(), 4, return_complex=True, window=torch.ones(4)), 4, window=torch.ones(4)),
    "arccosh": lambda w: torch.arccosh(w + 1),
    "__rdiv__": lambda w: w.__rdiv__(2.0),
    "ldexp": lambda w: torch.ldexp(w, i(2).to(w.device)),
    "mvlgamma": lambda w: torch.mvlgamma(w + 2, 2),
    "polygamma": lambda w: torch.polygamma(1, w),
    "igamma": lambda w: torch.igamma(torch.ones(4, 4), w),
    "igammac": lambda w: torch.igammac(torch.ones(4, 4), w),
    "special_multigammaln": lambda w: S.multigammaln(w + 2, 2),
    "special_polygamma": lambda w: S.polygamma(1, w),
    "special_zeta": lambda w: S.zeta(2.5, w),
    "special_xlogy": lambda w: S.xlogy(w, w),
    "special_xlog1py": lambda w: S.xlog1py(w, w),
    "softmin": lambda w: F.softmin(w, 1),
    "threshold": lambda w: torch.threshold(w, 1.0, 0.3),
    "_threshold": lambda w: F.threshold(w, 1.0, 0.3),
    "log_sigmoid": F.logsigmoid,
    "prelu": lambda w: F.prelu(w - 1, w[0]),
    "layer_norm": lambda w: F.layer_norm(w, (4,), w[0]),
    "group_norm": lambda w: F.group_norm(w, 2, w[0]),
    "instance_norm": lambda w: F.instance_norm(w[None], weight=w[0]),
    "rms_norm": lambda w: F.rms_norm(w, (4,), w[0]),
    "local_response_norm": lambda w: F.local_response_norm(w[None], 2),
    "cosine_similarity": lambda w: F.cosine_similarity(w[:, None], w[None], dim=-1),
    "pairwise_distance": lambda w: F.pairwise_distance(w, w.square() + 1),
    "pdist": F.pdist,
    "dist": lambda w: torch.dist(w, w.square()),
    "renorm": lambda w: w.renorm(2, 0, 1.0),
    "norm_except_dim": lambda w: torch.norm_except_dim(w, 2, 0),
    "gradient": torch.gradient,
    "kthvalue": lambda w: w.kthvalue(2, 1),
    "kthvalue of many": lambda w: w.round(decimals=0).flatten().kthvalue(9).values * w + w.sort(stable=True).values,
    "topk": lambda w: w.topk(2),
    "topk of equals": lambda w: torch.cat([w, w], 1).topk(3, sorted=True).values,
    "sort of equals": lambda w: torch.cat([w, w]).sort(dim=0, stable=True),
    "quantile of all": lambda w: torch.quantile(w, torch.tensor([0.2, 0.7]).to(w)),
    "searchsorted": lambda w: torch.searchsorted(w.flatten().cumsum(0), torch.arange(3).to(w)),
    "bucketize": lambda w: torch.bucketize(w.contiguous(), torch.arange(3).to(w)),
    "masked_fill": lambda w: w.masked_fill(torch.ones(4, 4, device=w.device).triu(1).bool(), 0.3),
    "masked_fill by one of its own": lambda w: w.masked_fill(w > 1, w[0, 0]),
    "masked_scatter": lambda w: w.masked_scatter(torch.ones(4, 4).triu(1).bool(), w.square()),
    "index_put": lambda w: w.index_put((i(0, 1, 1),), w[:3] * 2, accumulate=True),
    "index_put of a pair": lambda w: w.index_put((i(0, 2), i(1, 3)), w[0, :2]),
    "index_add": lambda w: w.index_add(0, i(0, 2, 2), w[:3], alpha=2),
    "index_copy": lambda w: w.index_copy(0, i(0, 2), w[:2]),
    "index_fill": lambda w: w.index_fill(0, i(0, 2), 0.5),
    "index_reduce": lambda w: w.index_reduce(0, i(0, 2, 2), w[:3], "amax"),
    "scatter": lambda w: w.scatter(0, i([2, 0, 1, 3]), w[:1] * 2),
    "scatter_add": lambda w: w.scatter_add(0, i([2, 0, 1, 1], [0, 3, 3, 2]), w[2:]),
    "scatter_reduce": lambda w: w.scatter_reduce(0, i([2, 0, 1, 1], [0, 3, 3, 2]), w[2:], "prod"),
    "put": lambda w: w.put(i(3, 4), w[0, :2]),
    "take": lambda w: torch.take(w, i(3, 4, 4)),
    "take_along_dim": lambda w: torch.take_along_dim(w, i([2, 0, 1, 1], [0, 3, 3, 2]), 0),
    "take_along_dim by its order": lambda w: torch.take_along_dim(w, w.argsort(1), 1),
    "select_scatter": lambda w: w.select_scatter(w[0], 0, 1),
    "slice_scatter": lambda w: w.slice_scatter(w[:1], 0, 1, 2),
    "diagonal_scatter": lambda w: w.diagonal_scatter(w[0]),
    "unfold": lambda w: w.unfold(0, 2, 1),
    "unfold of a map": lambda w: F.unfold(w[None, None], 2),
    "fold": lambda w: F.fold(w[None], (3, 3), (2, 2)),
    "broadcast_tensors": lambda w: torch.broadcast_tensors(w, w[0]),
    "meshgrid": lambda w: torch.meshgrid(w[0], w[1], indexing="ij"),
    "cartesian_prod": lambda w: torch.cartesian_prod(w[0], w[1]),
    "combinations": lambda w: torch.combinations(w[0]),
    "dsplit": lambda w: w.reshape(2, 2, 4).dsplit(2),
    "constant_pad_nd": lambda w: torch.constant_pad_nd(w, (1, 1), 0.5),
    "sum_to_size": lambda w: w.sum_to_size(1, 4),
    "pixel_shuffle": lambda w: F.pixel_shuffle(w.reshape(4, 2, 2), 2),
    "pixel_unshuffle": lambda w: F.pixel_unshuffle(w[None], 2),
    "channel_shuffle": lambda w: torch.channel_shuffle(w[None, :, :, None], 2),
    "grid_sample": lambda w: F.grid_sample(w[None, None], (w.reshape(1, 2, 4, 2) - 1).tanh(), align_corners=False),
    "affine_grid": lambda w: F.affine_grid(w[None, :2, :3], [1, 1, 3, 3], align_corners=False),
    "conv_transpose1d": lambda w: F.conv_transpose1d(w[None], w[:, None]),
    "conv_transpose2d": lambda w: F.conv_transpose2d(w[None, None], w[None, None]),
    "conv_transpose3d": lambda w: F.conv_transpose3d(w[None, None, None], w[None, None, None]),
    "max_pool3d": lambda w: F.max_pool3d(w[None, None], (1, 2, 2)),
    "adaptive_avg_pool3d": lambda w: F.adaptive_avg_pool3d(w.reshape(1, 2, 2, 4), (1, 1, 2)),
    "adaptive_max_pool1d": lambda w: F.adaptive_max_pool1d(w, 2),
    "adaptive_max_pool2d": lambda w: F.adaptive_max_pool2d(w[None], 2),
    "adaptive_max_pool3d": lambda w: F.adaptive_max_pool3d(w[None, None], (1, 2, 2)),
    "lp_pool1d": lambda w: F.lp_pool1d(w, 2.0, 2),
    "lp_pool2d": lambda w: F.lp_pool2d(w[None], 2.0, 2),
    "linalg_svd": lambda w: clipped(*L.svd(w)),
    **{
        f"linalg_svd of {name}": lambda w, shape=shape: clipped(*L.svd(shape(w), full_matrices=False))
        for name, shape in {"a pair": pair, "a wide one": wide, "a tall one": tall}.items()
    },
    "linalg_svdvals": L.svdvals,
    "linalg_svdvals of a pair": lambda w: L.svdvals(tall(pair(w))),
    "svd": lambda w: clipped(*(lambda u, s, v: (u, s, v.mT))(*torch.svd(w))),
    "linalg_eig": lambda w: L.eig(w).eigenvalues.abs(),
    "linalg_eigvals": lambda w: L.eigvals(pair(w)).abs(),
    "linalg_eigh": lambda w: (lambda values, vectors: (vectors * values.exp().unsqueeze(-2)) @ vectors.mT)(*L.eigh(w + w.mT)),
    "linalg_eigh of a pair": lambda w: L.eigh(pair(w + w.mT)).eigenvectors.abs(),
    "linalg_eigvalsh": L.eigvalsh,
    "linalg_eigvalsh of a pair": lambda w: L.eigvalsh(pair(w), UPLO="U"),
    **{
        f"linalg_lu of {name}": lambda w, shape=shape: L.lu(shape(w))
        for name, shape in {"a pair": pair, "wide": wide, "tall": tall}.items()
    },
    "linalg_lu_factor": L.lu_factor,
    "linalg_lu_factor of a pair": lambda w: L.lu_factor(pair(w)),
    "linalg_lu_factor_ex": L.lu_factor_ex,
    "lu": torch.lu,
    "lu_unpack": lambda w: torch.lu_unpack(*L.lu_factor(w)),
    "qr": lambda w: torch.qr(tall(w)),
    "cholesky": lambda w: torch.cholesky(spd(w)),
    "linalg_cholesky_ex": lambda w: L.cholesky_ex(spd(pair(w))),
    "cholesky_inverse": lambda w: torch.cholesky_inverse(L.cholesky(spd(w))),
    "cholesky_inverse of a pair": lambda w: torch.cholesky_inverse(L.cholesky(spd(pair(w)))),
    "cholesky_solve": lambda w: torch.cholesky_solve(tall(w), L.cholesky(spd(w))),
    "cholesky_solve of a pair": lambda w: torch.cholesky_solve(w, L.cholesky(spd(pair(w)))),
    "linalg_inv_ex": lambda w: L.inv_ex(w + 4 * eye(w)),
    "linalg_solve_ex": lambda w: L.solve_ex(w + 4 * eye(w), w),
    "linalg_solve_ex of vectors": lambda w: L.solve_ex(w + 4 * eye(w), w[0]),
    "linalg_solve_ex of a pair": lambda w: L.solve_ex(pair(w) + 4 * eye(w), w),
    "linalg_lstsq": lambda w: L.lstsq(tall(w), w)[0],
    "linalg_tensorinv": lambda w: L.tensorinv((w + 4 * eye(w)).reshape(2, 2, 4)),
    "linalg_tensorsolve": lambda w: L.tensorsolve(w + 4 * eye(w), w[0]),
    "triangular_solve": lambda w: torch.triangular_solve(w, w + eye(w)).solution,
    "det": torch.det,
    "det of a pair": lambda w: torch.det(pair(w)),
    "slogdet": lambda w: torch.slogdet(pair(w)),
    **{f"linalg_cond {p}": lambda w, p=p: L.cond(w, p) for p in (None, -2, "nuc")},
    **{f"linalg_matrix_norm {p}": lambda w, p=p: L.matrix_norm(w, p) for p in (2, -2, 1, float("inf"), "fro", "nuc")},
    "linalg_matrix_norm of a pair": lambda w: L.matrix_norm(tall(pair(w)), 2, dim=(0, 2)),
    "linalg_matrix_rank": lambda w: L.matrix_rank(w) * w,
    "linalg_matrix_power": lambda w: L.matrix_power(w, 3) + L.matrix_power(w + 4 * eye(w), -2),
    "linalg_matmul": lambda w: L.matmul(w, pair(w)),
    "linalg_multi_dot": lambda w: L.multi_dot([w[0], w, wide(w).T]),
    "linalg_cross": lambda w: L.cross(w[:, :3], w[:, 1:]),
    "linalg_diagonal": L.diagonal,
    "linalg_vander": lambda w: L.vander(w[0]),
    "linalg_vecdot": lambda w: L.vecdot(w, w.square()),
    "ger": lambda w: torch.ger(w[0], w[1]),
    **each(F, "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss", lambda f, w: f(w, w.square())),
    "cross_entropy": lambda w: F.cross_entropy(w, i(0, 1, 2, 1)),
    "nll_loss": lambda w: F.nll_loss(w, i(0, 1, 2, 1)),
    "binary_cross_entropy": lambda w: F.binary_cross_entropy(w.sigmoid(), torch.ones(4, 4).triu().to(w)),
    "binary_cross_entropy_with_logits": lambda w: F.binary_cross_entropy_with_logits(w, w.sigmoid()),
    "hinge_embedding_loss": lambda w: F.hinge_embedding_loss(w, torch.ones(4, 4).triu().to(w) * 2 - 1, 1.5),
    "cosine_embedding_loss": lambda w: F.cosine_embedding_loss(w, w.square(), i(1, -1, 1, -1)),
    "multilabel_soft_margin_loss": lambda w: F.multilabel_soft_margin_loss(w, torch.ones(4, 4).triu().to(w)),
}
