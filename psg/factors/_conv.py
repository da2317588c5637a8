"""Conv: the gradient of a convolution. In effect an Outer over unfolded patches, which are formed only where that is cheapest."""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from psg import plans
from psg._errors import InputError
from psg._hardware import _fused, _machine, _matmul
from psg._torch import _functorch
from psg.factors._arithmetic import scale_rows, squared_terms_of, wide, wide_bmm, widen
from psg.factors._base import Dense, Work, expect_real
from psg.factors._outer import Outer
from psg.factors._planned import Costs, Planned, remembered
from psg.factors._sketch import Sketch


class Geometry(NamedTuple):
    """The options of a convolution, with one entry for each spatial dimension.

    Example:
        >>> Geometry(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1).kernel
        (3, 3)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def out_of(self, size: Sequence[int]) -> list[int]:
        """How many output positions a convolution of an input of this size has in each dimension."""
        each = zip(size, *self[:-1], strict=True)
        return [max(0, 1 + (own + 2 * padding - dilation * (taps - 1) - 1) // stride) for own, taps, stride, padding, dilation in each]

    def dead_taps(self, size: Sequence[int], out: Sequence[int]) -> list[list[int]]:
        """For each dimension, the taps of the kernel that only ever meet padding."""

        def lives(tap: int, dim: int) -> bool:
            place = self.dilation[dim] * tap - self.padding[dim]  # read by the first output position; the next reads a stride later
            first = max(0, -(place // self.stride[dim]))  # the first output position whose place is not before the input
            return first < out[dim] and place + self.stride[dim] * first < size[dim]

        return [[tap for tap in range(taps) if not lives(tap, dim)] for dim, taps in enumerate(self.kernel)]

    def may_read_padding_alone(self, size: Sequence[int]) -> bool:
        """Whether all taps of some output position may lie in the padding, of which there are two sides, around an input of this size."""
        each = zip(self.kernel, self.padding, self.dilation, size, strict=True)
        return any(padding > dilation * (taps - 1) or padding and dilation > own for taps, padding, dilation, own in each)


_FEW_BYTES = 1 << 15
"""To copy the patches of all samples takes less time than a call for each sample and group, if they take no more bytes each."""


class Conv(Planned):
    """gradient[n, o, i, k] = sum over images and output positions t of cotangent[n, o, t] input[n, i, stride t + dilation k - padding].

    With groups g, output channel o reads only the i / g input channels of its own group.

    Args:
        cotangent: [n, images, o, *spatial out]. The images are fn's own batch dimension (1 for one image a sample); their gradients add up.
        input: [n, images, i, *spatial in].
        geometry: Kernel, stride, padding, dilation, groups.

    Raises:
        InputError: The tensors are complex, or their shapes do not fit.

    Example:
        >>> import torch
        >>> geometry = Geometry(kernel=(2,), stride=(1,), padding=(0,), dilation=(1,), groups=1)
        >>> Conv(torch.ones(1, 1, 1, 3), torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), geometry).materialize()
        tensor([[[[6., 9.]]]])

    Source: Rochette, Manoel & Tramel, "Efficient Per-Example Gradient Computations in Convolutional Neural Networks", 2019 (the grouped
    convolution); Bu, Mao & Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
    2022 (the Gram form over patches).
    """

    fields = ("cotangent", "input")
    summed = fields
    constants = ("geometry",)

    def __init__(self, cotangent: Tensor, input: Tensor, geometry: Geometry) -> None:
        if not cotangent.ndim == input.ndim == 3 + len(geometry[0]) or cotangent.shape[:2] != input.shape[:2]:
            shapes = f"{tuple(cotangent.shape)} and {tuple(input.shape)}"
            raise InputError(
                f"psg.factors.Conv: expected a cotangent [n, images, o, *out] and an input [n, images, i, *in], got {shapes}; one image a "
                "sample is [n, 1, c, *spatial]."
            )
        self.cotangent = cotangent
        self.input = input
        groups = geometry[4]
        kernel, stride, padding, dilation = map(tuple, geometry[:4])  # lists could not be part of the key under which costs are remembered
        self.geometry = Geometry(kernel, stride, padding, dilation, groups)
        expect_real(self, cotangent, input)
        most = self.geometry.out_of(input.shape[3:])
        if cotangent.shape[2] % groups or input.shape[2] % groups or any(map(operator.gt, cotangent.shape[3:], most)):
            raise InputError(
                f"psg.factors.Conv: {self.geometry} has {groups} groups and, from an input {tuple(input.shape)}, at most {most} output "
                f"positions; got a cotangent {tuple(cotangent.shape)}."
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.cotangent.shape[2], self.input.shape[2] // self.geometry.groups, *self.geometry.kernel))

    @property
    def positions(self) -> int:
        """The number of terms t of the sum: images times output positions."""
        return self.cotangent.shape[1] * self.cotangent.shape[3:].numel()

    @property
    def _lead(self) -> Tensor:
        return self.cotangent

    def materialize(self) -> Tensor:
        if self.n == 0 or self.positions == 0:
            return self.cotangent.new_zeros(self.n, *self.shape)
        return self._materialize_by(plans.choose("materialize", self._materialize_costs(), self, self._materialize_by))

    def _materialize_by(self, plan: str) -> Tensor:
        ways = {
            "convolution": self._grouped_convolution,
            "samples": self._sample_by_sample,
            "patches": self._patch_products,
            "correlation": self._correlation,
        }
        return ways[plan]()

    def _correlation(self) -> Tensor:
        """gradient[n, g]: the one channel of a group correlated with its cotangent."""
        # The cotangents serve as kernels, so stride and dilation change places.
        _, stride, padding, dilation, _ = self.geometry
        input, kernels = self.input.reshape(1, -1, *self.input.shape[3:]), self.cotangent.flatten(0, 2).unsqueeze(1)
        result = torch.convolution(input, kernels, None, dilation, padding, stride, False, [0] * len(stride), len(kernels))
        return result[(slice(None), slice(None), *map(slice, self.geometry.kernel))].reshape(self.n, *self.shape)

    def _patch_products(self) -> Tensor:
        """gradient[n, g] = left[n, g] patches[n, g], a few samples at a time so that the patches stay in cache."""
        (out_channels, in_channels, *kernel), groups, dims = self.shape, self.geometry.groups, len(self.geometry.kernel)
        left = self.cotangent.unflatten(2, (groups, -1)).flatten(4).permute(0, 2, 3, 1, 4).reshape(self.n, groups, -1, self.positions)
        windows = self._windows()  # [n, images, g, i / g, *out, *kernel]
        out, taps = range(4, 4 + dims), range(4 + dims, 4 + 2 * dims)
        # Channels innermost where there are many (one long copy for each tap), positions innermost where there are few.
        channels_last = self._has_many_channels and any(size > 1 for size in kernel)
        windows = windows.permute((0, 2, 1, *out, *taps, 3) if channels_last else (0, 2, 3, *taps, 1, *out))
        matrix = (self.positions, self.shape[1:].numel())
        by_entry = self.positions == 1 and (groups > 1 or _matmul.multiplies(self.device, left.shape[2], matrix[1]))
        multiply = torch.mul if by_entry else torch.bmm
        # Over one line of pixels patches may be a view, whose rows overlap: bmm would copy and multiply it sample by sample.
        is_copied = self._patch_bytes() <= _FEW_BYTES * groups and left.shape[2] * math.prod(matrix) >= _matmul.FEW_PRODUCTS

        def sides(chunk: slice) -> tuple[Tensor, Tensor]:
            some = windows[chunk]
            patches = some.reshape(-1, *matrix) if channels_last else some.reshape(-1, *matrix[::-1]).mT
            overlap = patches.stride(1) < patches.shape[2] and patches.stride(2) == 1
            return left[chunk].flatten(0, 1), patches.contiguous() if is_copied and overlap else patches

        size = _machine.items_at_a_time(self.device, self._patch_bytes())
        if size >= self.n or self.is_differentiated:  # writes by `out=` have no derivative
            gradient = multiply(*sides(slice(None)))
        else:
            gradient = left.new_empty(self.n, *left.shape[1:3], matrix[1])
            for start in range(0, self.n, size):
                chunk = slice(start, start + size)
                multiply(*sides(chunk), out=gradient[chunk].flatten(0, 1))
        if channels_last:
            return gradient.reshape(self.n, out_channels, *kernel, in_channels).movedim(-1, 2)
        return gradient.reshape(self.n, *self.shape)

    def _sample_by_sample(self) -> Tensor:
        samples = zip(self.cotangent, self.input, strict=True)
        return torch.stack([self._native_gradient(c, x, tuple(self.shape), self.geometry.groups) for c, x in samples])

    def _grouped_convolution(self) -> Tensor:
        # The samples become groups of one convolution, whose weight gradient keeps groups apart.
        cotangent, input = self.cotangent.transpose(0, 1).flatten(1, 2), self.input.transpose(0, 1).flatten(1, 2)
        weight_shape = (self.n * self.shape[0], *self.shape[1:])
        gradient = self._native_gradient(cotangent, input, weight_shape, groups=self.n * self.geometry.groups)
        return gradient.reshape(self.n, *self.shape)

    def _native_gradient(self, cotangent: Tensor, input: Tensor, weight_shape: tuple[int, ...], groups: int) -> Tensor:
        if cotangent.numel() == 0 or input.numel() == 0:
            return cotangent.new_zeros(weight_shape)
        if input.shape[2:].numel() == 1:
            # The strides of a single pixel mean nothing, but torch may infer one memory layout for all channels and another for a group.
            input = input.reshape(-1).view(input.shape)
        _, stride, padding, dilation, _ = self.geometry
        weight = cotangent.new_empty(weight_shape)  # only its shape is read
        none = [0] * len(stride)
        mask = [False, True, False]
        arguments = cotangent, input, weight, None, stride, padding, dilation, False, none, groups, mask
        gradient = torch.ops.aten.convolution_backward(*arguments)[1]
        if cotangent.dtype.itemsize < 4 and cotangent.device.type == "cpu":
            # oneDNN's kernel (torch 2.13) leaves taps that only meet padding uninitialised.
            for dim, dead in enumerate(self.geometry.dead_taps(input.shape[2:], cotangent.shape[2:]), start=2):
                if dead:
                    gradient = gradient.index_fill(dim, torch.tensor(dead, device=gradient.device), 0)
        return gradient

    def _by_group(self) -> Outer:
        """An Outer of n x g samples with the same inner products: left [(n g), t, o / g], right [(n g), t, k (i / g)]."""
        groups, dims = self.geometry.groups, len(self.geometry.kernel)
        # Inner products do not depend on the order of a patch's entries. Many channels are best copied as one run of memory.
        right = self._windows(channels_last=self._has_many_channels).permute(0, 2, 1, *range(4, 4 + 2 * dims), 3)
        left = self.cotangent.unflatten(2, (groups, self.shape[0] // groups)).flatten(4).permute(0, 2, 1, 4, 3)
        lead = self.n * groups, self.positions
        return Outer(left.reshape(*lead, self.shape[0] // groups), right.reshape(*lead, self.shape[1:].numel()))

    def _unfolded(self) -> Outer:
        """Without groups, the same gradient as matrices [o, (i k)]: left [n, t, o], right [n, t, (i k)]."""
        dims = len(self.geometry.kernel)
        right = self._windows().squeeze(2).permute(0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
        left = self.cotangent.flatten(3).transpose(2, 3).flatten(1, 2)
        return Outer(left, right.reshape(self.n, self.positions, self.shape[1:].numel()))

    def _windows(self, channels_last: bool = False) -> Tensor:
        """The patches, [n, images, g, i / g, *out, *kernel], as a view of the padded input: no patch is copied."""
        kernel, stride, padding, dilation, groups = self.geometry
        n, images, channels, *_ = self.input.shape
        padded = self.input
        if any(padding):
            padded = F.pad(padded.flatten(0, 1), [amount for p in reversed(padding) for amount in (p, p)]).unflatten(0, (n, images))
        if channels_last:
            padded = padded.movedim(2, -1).contiguous().movedim(-1, 2)
        elif self.is_differentiated:  # the derivative of as_strided takes entries that share their memory for one
            padded = padded.contiguous()
        spatial = padded.stride()[3:]
        return padded.as_strided(
            (n, images, groups, channels // groups, *self.cotangent.shape[3:], *kernel),
            (
                *padded.stride()[:2],
                padded.stride(2) * (channels // groups),
                padded.stride(2),
                *(step * pace for step, pace in zip(spatial, stride, strict=True)),
                *(step * gap for step, gap in zip(spatial, dilation, strict=True)),
            ),
            padded.storage_offset(),
        )

    @property
    def _has_kernel(self) -> bool:
        """Whether this is a convolution that `_fused` has kernels for, whatever its dtype."""
        if self.geometry.groups > 1 or len(self.geometry.kernel) > 2 or self.is_differentiated or not self.shape.numel():
            return False
        entries = max(self._pixels() * self.input.shape[2], self.positions * self.shape[0])
        return entries < 1 << 30  # the kernels count those of a sample in 32 bits

    @property
    def _is_fused(self) -> bool:
        """Whether a kernel of its own computes norms from gradients that it never writes."""
        takes = _fused.takes_conv(self.cotangent) and _fused.takes_conv(self.input)
        return takes and self.cotangent.shape[1] == 1 and self._has_kernel

    @property
    def _can_fuse_sum(self) -> bool:
        """Whether another can compute weighted sums."""
        takes = _fused.takes_conv_sum(self.cotangent) and _fused.takes_conv_sum(self.input)
        return takes and self._is_planned and self._has_kernel

    @property
    def _is_sum_fused(self) -> bool:
        """Whether it does."""
        return self._can_fuse_sum and plans.choose("sum", self._sum_costs(), self, self._sum_by) == "kernel"

    def _kernels(self) -> Hashable:
        return (self._is_fused, self._can_fuse_sum) if self.cotangent.is_cuda else ()

    def _as_images(self) -> tuple[Any, ...]:
        """The arguments of the kernels: cotangents [n images, o, h, w], inputs [n images, i, h, w], and pairs of options."""
        cotangent, input = self.cotangent.flatten(0, 1), self.input.flatten(0, 1)
        kernel, stride, padding, dilation, _ = self.geometry
        if len(kernel) == 2:
            return cotangent, input, kernel, stride, padding, dilation
        # One line of pixels is an image.
        return cotangent.unsqueeze(2), input.unsqueeze(2), (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)

    def _chunked_norm(self) -> Tensor:
        return _fused.conv_squared_norm(*self._as_images()) if self._is_fused else super()._chunked_norm()

    def _gram_sums(self) -> tuple[Tensor, Tensor]:
        return self._gram_sums_by(plans.choose("gram", self._gram_costs(), self, self._gram_sums_by))

    def _gram_sums_by(self, plan: str) -> tuple[Tensor, Tensor]:
        by_patches, groups = plan == "patches", self.geometry.groups
        size = self._patch_bytes() if by_patches else groups * self._pixels() ** 2 * self.cotangent.element_size()
        parts = [chunk._patch_gram_sums() if by_patches else chunk._pixel_gram_sums() for chunk in self._chunks(size)]
        squared, squared_terms = (torch.cat(side) for side in zip(*parts, strict=True))
        if groups == 1:
            return squared, squared_terms
        return squared.reshape(self.n, groups).sum(1), squared_terms.reshape(self.n, groups).sum(1)

    def _chunks(self, size: int) -> "list[Conv]":
        """A few samples at a time, so that temporaries of `size` bytes a sample stay in cache."""
        count = _machine.items_at_a_time(self.device, size, chunks=4)
        if count >= self.n:
            return [self]
        return [Conv(c, x, self.geometry) for c, x in zip(self.cotangent.split(count), self.input.split(count), strict=True)]

    def _patch_gram_sums(self) -> tuple[Tensor, Tensor]:
        """For every sample and group, [(n g)]: the squared norm from inner products of patches, and `squared_terms`."""
        return self._by_group()._gram_sums()

    def squared_terms(self) -> Tensor:
        return self._by_group().squared_terms().reshape(self.n, self.geometry.groups).sum(1)

    def _pixel_gram_sums(self) -> tuple[Tensor, Tensor]:
        """The same from inner products of pixels."""
        # Patches overlap, so their inner products are sums of inner products of pixels: <patch_t, patch_s> = sum_k <x[t + k], x[s + k]>
        # over the taps k of the kernel. These lie on diagonals of the pixels' Gram matrix; one spatial dimension is summed at a time.
        kernel, stride, padding, dilation, groups = self.geometry
        images, _, *size = self.input.shape[1:]
        patches, cotangents = _gram_of(self.input, groups), _gram_of(self.cotangent, groups)
        patches = patches.unflatten(2, (images, *size)).unflatten(1, (images, *size))
        for i, options in enumerate(zip(self.cotangent.shape[3:], kernel, stride, padding, dilation, strict=True)):
            patches = _sum_diagonals(patches, 2 + i, 3 + len(size) + i, *options)
        patches = patches.reshape(cotangents.shape)
        return (patches * cotangents).sum((1, 2)), squared_terms_of(patches, cotangents)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._is_correlated:
            return Dense(self.materialize()).weighted_sum(weights)
        if self._is_sum_fused and not weights.requires_grad:
            return self._fused_sum(weights, skips=False)
        return self._native_sum(weights)

    def _native_sum(self, weights: Tensor) -> Tensor:
        if self._is_summed_at_once:
            return self._unfolded().weighted_sum(weights).reshape(self.shape)
        cotangent, input = scale_rows(widen(self.cotangent), weights).flatten(0, 1), widen(self.input).flatten(0, 1)
        return self._native_gradient(cotangent, input, tuple(self.shape), groups=self.geometry.groups)

    def weighted_sum_of(self, weights: Tensor, keep: Tensor, finite: Tensor) -> Tensor:
        if not self._is_sum_fused or weights.requires_grad:
            return super().weighted_sum_of(weights, keep, finite)
        return self._fused_sum(weights, skips=True)

    def _sum_by(self, plan: str) -> Tensor:
        weights = torch.ones(self.n, device=self.device)
        return self._fused_sum(weights, skips=True) if plan == "kernel" else self._native_sum(weights)

    def _fused_sum(self, weights: Tensor, skips: bool) -> Tensor:
        images = self.cotangent.shape[1]
        weights = weights if images == 1 else weights.repeat_interleave(images)
        return _fused.conv_weighted_sum(weights, *self._as_images(), skips=skips).reshape(self.shape)

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        if self.geometry.groups > 1 or self.positions != 1:
            return super().moment_sums()
        total, squares = self._unfolded().moment_sums()
        return total.reshape(self.shape), squares.reshape(self.shape)

    def project(self, sketch: Sketch) -> Tensor:
        touched = self.positions * (self.shape[0] + self.shape[1:].numel() + sketch.dim)
        if self.geometry.groups > 1 or not 0 < touched < self.shape.numel():
            return super().project(sketch)
        return torch.cat([chunk._unfolded().project(sketch) for chunk in self._chunks(self._patch_bytes())])

    def dot(self, direction: Tensor) -> Tensor:
        return self.products(direction).flatten(1).sum(1)

    def products(self, direction: Tensor) -> Tensor:
        """The terms of <gradient[n], direction>, by image, output channel and position -> [n, images, o, *spatial out].

        A direction with a single output channel, for one group, is broadcast over all output channels.
        """
        # The cotangent times the convolution of the input with the direction, entry by entry.
        _, stride, padding, dilation, groups = self.geometry
        cotangent, input = widen(self.cotangent), widen(self.input).flatten(0, 1)
        none = [0] * len(stride)
        forward = torch.convolution(input, direction.to(input.dtype), None, stride, padding, dilation, False, none, groups)
        return forward.unflatten(0, cotangent.shape[:2]) * cotangent

    def plan(self) -> str:
        plan = self._plan()
        if plan == "keep":
            return "materialised and kept"
        if plan == "gram":
            plan = f"Gram of {plans.choose('gram', self._gram_costs(), self, self._gram_sums_by)}"
        else:
            plan = "kernel" if self._is_fused else "materialised in chunks"
        summed = "and once more" if self._is_correlated else "sum by a kernel" if self._is_sum_fused else "native weight gradient"
        return f"{plan}, {summed}"

    # Costs, in operations for one sample

    @remembered
    def _norm_costs(self) -> Costs:
        byte = _machine.reused_byte(self.device, self.dtype)
        chunks = self._fused_cost(byte) if self._is_fused else self._chunks_cost(byte)
        return {"gram": min(self._gram_costs().values()), "chunks": chunks}

    def _fused_cost(self, byte: float) -> float:
        """The cost of a norm by `_fused`, which lays out both tensors anew; compilers lay out some so themselves."""
        # Measured on an H200 (benchmarks/results/kernels_h200.json): four times as slow as cuBLAS is at its best, in TF32 and in bfloat16;
        # few positions do not fill the steps of its loop.
        copies = 0 if _functorch.is_traced() else 2 * self._bytes_of(self._pixels())
        return 4 * 2 * (self.positions + 32) * self.shape.numel() + byte * (copies + self._bytes_of(self._pixels_read()))

    @remembered
    def _gram_costs(self) -> Costs:
        t, pixels, groups, size = self.positions, self._pixels(), self.geometry.groups, wide(self.dtype).itemsize
        byte, out, patch = _machine.reused_byte(self.device, self.dtype), self.shape[0], groups * self.shape[1:].numel()
        # The sum over the taps of a dimension clears its result; each tap reads the result and a summand, and writes the result.
        passes = 4 + sum(1 + 3 * taps for taps in self.geometry.kernel)
        return {
            "patches": t * t * (2 * (out + patch) + 3 * byte * groups * size) + self._patch_cost(),
            "pixels": 2 * (t * t * out + pixels * pixels * self.input.shape[2]) + passes * byte * groups * size * max(t, pixels) ** 2,
        }

    @remembered
    def _materialize_costs(self) -> Costs:
        groups, is_flat = self.geometry.groups, all(size == 1 for size in self.geometry.kernel)
        if self.device.type != "cpu":
            if groups > 1:
                return {"convolution": 0}
            # Convolutions of many groups are slow on GPUs; the threshold is that of torch.nn.utils._expanded_weights.
            return {"patches": 0 if is_flat or self.shape[1] < 4 else 32, "convolution": self.n}
        # Measured: benchmarks/micro.py, conv.
        byte, t, entries = _machine.reused_byte(self.device, self.dtype), self.positions, self.shape.numel()
        products, written = 2 * t * entries, byte * self.sample_bytes
        left, right = byte * t * self.shape[0] * self.dtype.itemsize, byte * self._pixels() * self.input.shape[2] * self.dtype.itemsize
        patches = 0 if is_flat else byte * self._patch_bytes()
        # The cost of native kernels in cases that they too compute from patches, group by group.
        columns = 1.4 * products + 1.3 * byte * self._patch_bytes() + left + 30_000 * groups
        native, many = self._native_costs(products, left + right, columns)
        # The result of a grouped convolution is laid out anew: from newly allocated memory and, beyond the cache size, read from there.
        fresh = _machine.fresh_byte(self.device, self.dtype, self.dense_bytes)
        again = (fresh if entries < 100_000 else _machine.kept_byte(self.device, self.dtype)) * self.sample_bytes
        # Patches are copied in runs: of channels, of positions or, where there is one position, of a row of the kernel.
        run = self.shape[1] if self._has_many_channels else self.cotangent.shape[-1] if t > 1 else self.geometry.kernel[-1]
        costs = {"patches": products + patches * (1 + 8 / run) + left + written, "convolution": many + again}
        if groups == 1 and not _functorch.is_traced():  # a traced graph would grow with the number of samples
            costs["samples"] = native + _NATIVE_CALL * torch.get_num_threads() + 2 * written
        if self._is_depthwise:
            costs["correlation"] = 3.5 * products + left + right + written + (350_000 * groups if t == 1 else 0)
        return costs

    def _native_costs(self, products: float, data: float, columns: float) -> tuple[float, float]:
        """The costs of native kernels for each sample alone, and for all samples as groups of one convolution."""
        (out_channels, in_channels, *kernel), groups = self.shape, self.geometry.groups
        if self.dtype not in _NATIVE_DTYPES or not 1 < max(kernel) <= 14:
            return columns, columns
        # oneDNN works on blocks of channels. It pads the channels of a single group to whole blocks, but not those of many groups.
        filled = -(-out_channels // 16) * 16 / out_channels * (-(-in_channels // 8) * 8 / in_channels if in_channels >= 4 else 1)
        is_direct = len(kernel) < 3 or self._is_direct_in_space
        alone = products * filled + data if is_direct else columns
        if self.n * groups == 1:
            return alone, alone
        block = 16 if len(kernel) == 3 and kernel[0] > 1 and in_channels > 8 else 8
        fits = (out_channels // groups) % 8 == 0 and in_channels % block == 0 and self.positions > 1
        # Small depthwise kernels have an implementation of their own.
        small = self._is_depthwise and len(kernel) == 2 and max(kernel) <= 3 and max(self.geometry.dilation) == 1
        fits = fits or small and min(self.input.shape[3:]) >= max(kernel)
        return alone, products + data if fits else columns

    @property
    def _is_direct_in_space(self) -> bool:
        """Whether the native kernel for one sample of a three-dimensional convolution is oneDNN's, and forms no patches."""
        # When torch calls oneDNN: `use_mkldnn` in its Convolution.cpp. For 4 to 15 channels oneDNN, too, forms patches of deep kernels.
        depth, *plane = self.geometry.kernel
        is_called = min(plane) > 3 or self.input.shape[1] > 1 or self.input.shape[1:-1].numel() > 20480
        return is_called and (depth == 1 or not 4 <= self.shape[1] < 16)

    @property
    def _has_many_channels(self) -> bool:
        return self.shape[1] >= 16

    @property
    def _is_depthwise(self) -> bool:
        """Whether `_correlation` applies."""
        fits = self.cotangent.shape[1] == 1 and self.shape[1] == 1 and self.shape[0] == self.geometry.groups
        return fits and self.device.type == "cpu" and self.dtype in _NATIVE_DTYPES

    @property
    def _is_summed_at_once(self) -> bool:
        """Whether a weighted sum is one small product of patches: the native kernel would reorder the whole weight for so few columns."""
        return self.geometry.groups == 1 and 0 < self.n * self.positions <= 128

    @property
    def _is_correlated(self) -> bool:
        """Whether a weighted sum too is faster by `_correlation`: for depthwise kernels that are large, dilated or three-dimensional.

        Their native gradient, of one sample or of all, takes up to twenty times as long (measured: benchmarks/micro.py, conv).
        """
        kernel, _, _, dilation, _ = self.geometry
        slow = len(kernel) > 1 and (max(kernel) > 3 or max(dilation) > 1 or len(kernel) > 2)
        return self._is_depthwise and slow and self.positions > 1

    def _materialize_cost(self) -> float:
        # Small products: measured on an H200.
        return (1 if self.device.type == "cpu" else 4) * 2 * self.positions * self.shape.numel() + self._patch_cost()

    def _patch_cost(self) -> float:
        """The cost of forming patches."""
        # On an accelerator, copies that are not in order are slow, and those of every other pixel read them all (measured on an H200).
        passes = 2 if self.device.type == "cpu" else 6 * self.geometry.stride[-1]
        return passes * _machine.reused_byte(self.device, self.dtype) * self._patch_bytes()

    def _work(self) -> Work:
        # Inner products with another term take the patches of both.
        return super()._work()._replace(gram=self._gram_costs()["patches"] + self._patch_cost())

    def _sum_cost(self) -> float:
        return min(self._sum_costs().values())

    @remembered
    def _sum_costs(self) -> Costs:
        products, byte = 2 * self.positions * self.shape.numel(), _machine.reused_byte(self.device, self.dtype)
        if self._is_correlated:
            return {"native": 4 * products + self._masking_cost()}  # at a quarter of the pace of products
        is_native = self.device.type == "cpu" and not self._is_summed_at_once
        call = 2 * _NATIVE_CALL * torch.get_num_threads() / max(1, self.n) if is_native else 0
        # The native kernels reorder their inputs first.
        read = byte * self._bytes_of(self._pixels())
        costs = {"native": call + products + 2 * read + self._masking_cost()}
        if not self._can_fuse_sum:
            return costs
        # Measured on an H200 (benchmarks/results/kernels_h200.json). Native sums of 16-bit numbers run in TensorFloat-32, to which the
        # tensors are converted first; the kernel comes to the end of a loop with every sample, which weighs as much as 96 positions.
        return {
            "native": 3 * products + 13 * read,
            "kernel": 3 * (products + 2 * 96 * self.shape.numel()) + byte * self._bytes_of(self._pixels_read()),
        }

    def _bytes_of(self, pixels: int) -> int:
        """The bytes of one sample's cotangent and of so many pixels of its input."""
        return (self.positions * self.shape[0] + pixels * self.input.shape[2]) * self.dtype.itemsize

    def _pixels_read(self) -> int:
        """How many pixels of a sample's input the convolution reads: with a stride that is larger than the kernel, not all."""
        return min(self._pixels(), self.positions * math.prod(self.geometry.kernel))

    def _patch_bytes(self) -> int:
        return self.positions * self.geometry.groups * self.shape[1:].numel() * self.cotangent.element_size()

    def _pixels(self) -> int:
        return self.input.shape[1] * self.input.shape[3:].numel()


# The dtypes for which oneDNN has kernels on every CPU.
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)

# The cost of calling a native kernel, in operations for each thread.
_NATIVE_CALL = 2_500_000


def _gram_of(tensor: Tensor, groups: int) -> Tensor:
    """[n, images, g c, *spatial] -> the inner products over c of every two pixels, [n g, t, t] with t = images times pixels."""
    n, images, channels = tensor.shape[:3]
    columns = tensor.reshape(n, images, groups, channels // groups, tensor.shape[3:].numel()).permute(0, 2, 3, 1, 4)
    columns = columns.reshape(n * groups, channels // groups, images * tensor.shape[3:].numel())
    return wide_bmm(columns.transpose(1, 2), columns)


def _sum_diagonals(gram: Tensor, first: int, second: int, count: int, taps: int, stride: int, padding: int, dilation: int) -> Tensor:
    """sum_k gram[.., stride t + dilation k - padding, .., stride s + dilation k - padding, ..] -> [.., t, .., s, ..] for t, s < count.

    `first` and `second` are the two dimensions; entries outside of `gram` count as zero.
    """
    size = gram.shape[first]
    shape = list(gram.shape)
    shape[first] = shape[second] = count
    total = gram.new_zeros(shape)
    for offset in range(-padding, taps * dilation - padding, dilation):
        start = max(0, -(offset // stride))  # the first t for which stride t + offset >= 0
        stop = min(count, (size - 1 - offset) // stride + 1)
        if start < stop:
            there: list[Any] = [slice(None)] * gram.ndim
            there[first] = there[second] = slice(start * stride + offset, (stop - 1) * stride + offset + 1, stride)
            here = [slice(start, stop) if dim in (first, second) else slice(None) for dim in range(gram.ndim)]
            total[tuple(here)] += gram[tuple(there)]
    return total
