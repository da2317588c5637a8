"""Which ops are computed once for all samples on parameters and constants."""

import math
from typing import Any

from torch._functorch.autograd_function import custom_function_call

from psg._capture._adjoints import ADJOINTS
from psg._capture._lifted import Lifted, Tap
from psg._capture._steps import POINTWISE, REDUCING
from psg._torch._cached import cached
from psg._torch._ops import draws, is_torchs, name_of

# Deterministic, functional ops, which have one value for all samples. Factors are carried over those that have an adjoint, work entry by
# entry or reduce; over the others, which are named here, gradients are pulled back. An op that is not named is lifted, which is right too;
# one whose backward vmap gets wrong (cdist) must not be named, nor one that draws random numbers, unless `draws` tells in which calls. An
# output without a derivative, such as a mask, is a constant. (custom_function_call is every autograd.Function: the router's `_compute` sees
# if one has drawn.)
_DERIVING = frozenset({*ADJOINTS, *POINTWISE, *REDUCING}) | frozenset(
    """
    broadcast_tensors hstack vstack type_as round floor ceil trunc sign sgn cumsum cumprod index_put real imag conj resolve_conj
    view_as_real view_as_complex complex polar fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn
    fft_ifftn fft_rfftn fft_irfftn interpolate normalize as_strided conv1d conv2d conv3d max_pool1d max_pool2d avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d glu _weight_norm detach gt ge lt le eq ne __gt__ __ge__ __lt__ __le__
    __eq__ __ne__ logical_and logical_or logical_not isnan isinf isfinite argmax argmin addmv addr baddbmm cross trace bool byte char
    short int long diff matrix_power linalg_cholesky linalg_qr linalg_det linalg_slogdet logdet linalg_householder_product orgqr fft_hfft
    fft_ihfft fft_fftshift fft_ifftshift stft istft fix igamma igammac special_zeta special_round special_softmax special_log_softmax
    special_logsumexp softmin _threshold prelu layer_norm group_norm instance_norm rms_norm local_response_norm cosine_similarity
    pairwise_distance pdist dist renorm nanmedian quantile nanquantile kthvalue mode topk sort msort argsort aminmax cummax cummin
    logcumsumexp cov corrcoef trapezoid trapz cumulative_trapezoid gradient any all count_nonzero signbit isposinf isneginf isreal isclose
    isin greater greater_equal less less_equal not_equal logical_xor searchsorted bucketize masked_scatter index_copy index_fill
    index_reduce scatter put select_scatter slice_scatter diagonal_scatter unfold fold diagflat meshgrid cartesian_prod combinations
    column_stack row_stack dstack dsplit hsplit vsplit unsafe_chunk unsafe_split sum_to_size atleast_1d atleast_2d atleast_3d
    conj_physical pixel_shuffle pixel_unshuffle channel_shuffle grid_sample affine_grid conv_transpose1d conv_transpose2d conv_transpose3d
    max_pool3d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d linalg_svd
    linalg_svdvals svd linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh linalg_lu linalg_lu_factor linalg_lu_factor_ex lu lu_unpack
    qr cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve linalg_inv_ex linalg_solve_ex linalg_lstsq linalg_tensorinv
    linalg_tensorsolve triangular_solve det slogdet linalg_cond linalg_matrix_norm linalg_matrix_rank linalg_matrix_power linalg_multi_dot
    linalg_cross linalg_diagonal linalg_vander linalg_vecdot mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss
    binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss cosine_embedding_loss
    multilabel_soft_margin_loss scaled_dot_product_attention custom_function_call
    """.split()
)

_UNFIT_FOR_VMAP = frozenset(
    """
    block_diag index_reduce linalg_lu lu_unpack istft fake_quantize_per_channel_affine _sparse_mm select_scatter
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d custom_function_call
    """.split()
)
"""Ops that vmap runs sample by sample, lays out anew, or gives a wrong gradient; autograd.Functions are their users'."""

_DIRECT = frozenset(
    """
    cholesky linalg_cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve linalg_qr qr det linalg_det logdet slogdet linalg_slogdet lu
    linalg_lu_factor linalg_lu_factor_ex
    """.split()
)
_ITERATIVE = frozenset(
    """
    linalg_svd linalg_svdvals svd linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh linalg_householder_product orgqr linalg_lstsq
    linalg_cond linalg_matrix_rank linalg_pinv pinverse
    """.split()
)
# LAPACK factorises small matrices one after the other (measured: benchmarks/lifted.py, and single ops in float32).
_FACTORISING: dict[str, int] = {**dict.fromkeys(_DIRECT, 1 << 15), **dict.fromkeys(_ITERATIVE, 1 << 13)}
"""How many bytes of matrices, of all samples together, take about as long as a step that computes them once and pulls the result back."""


def derives(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call on parameters and constants is computed once."""
    return _may_derive(func) and (func is custom_function_call or not draws(func, args, kwargs))


@cached
def _may_derive(func: Any) -> bool:
    return name_of(func) in _DERIVING and is_torchs(func)


def runs_for_each(op: str, *values: Lifted | Tap) -> bool:
    """Whether vmap runs the op of this name for all samples in less time than it takes to compute it once and to pull its gradient back.

    Vmap and autograd run such an op like all others. A value that is computed once is lifted, which takes a step for each result, and its
    gradient is pulled back, which takes another.
    """
    most = _FACTORISING.get(op, math.inf)
    return op in _DERIVING and op not in _UNFIT_FOR_VMAP and all([value.is_little and value.nbytes <= most for value in values])
