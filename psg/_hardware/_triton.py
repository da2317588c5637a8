"""Kernels in Triton, which comes with torch's builds for accelerators. `_fused.py` imports this where it is installed, and calls them."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def pad_rounded(x, out, channels, height, width, rows, columns, top, left, x_n, x_c, x_h, x_w, BLOCK: tl.constexpr):
    """Images x [n, channels, height, width] by their strides -> out [n, channels, rows, columns], padded, rounded to TensorFloat-32.

    One program writes BLOCK pixels of one channel. Tensor cores drop the low 13 bits of a float32, so that products of numbers that are not
    rounded before are too small.
    """
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = at // columns - top
    z = at % columns - left
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
    values = tl.load(x + image // channels * x_n + image % channels * x_c + y * x_h + z * x_w, mask=inside, other=0.0)
    rounded = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    rounded = tl.where(values == values, rounded, values)  # a NaN stays one
    tl.store(out + image * rows * columns + at, rounded, mask=at < rows * columns)


@triton.jit
def conv_norms(
    cotangent, input, out, tiles, positions, outs, ins, width, pace, line, channel,
    row_stride, column_stride, kernel_width, row_gap, column_gap, entries, c_n, c_o, c_t, x_n,
    LAST: tl.constexpr, OUTS: tl.constexpr, ENTRIES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """out[n, tile] = the squares of one tile of the weight gradient of sample n, added up.

    gradient[n, o, (i k)] = sum_t cotangent[n, o, t] input[n, i, stride t + dilation k]. The gradient lives in registers alone.

    Args: cotangent by its strides c_n, c_o, c_t, which reach beyond 32 bits if it is part of a larger tensor; the padded input, from pixel
    to pixel `pace`, from line to line `line` and from channel to channel `channel` apart. Entries are numbered with the channels innermost
    if LAST, and outermost otherwise: as memory is.
    """
    program = tl.program_id(0)
    sample = (program // tiles).to(tl.int64)
    tile = program % tiles
    across = tl.cdiv(entries, ENTRIES)
    o = tile // across * OUTS + tl.arange(0, OUTS)
    entry = tile % across * ENTRIES + tl.arange(0, ENTRIES)
    if LAST:
        tap, i = entry // ins, entry % ins
    else:
        tap, i = entry % (entries // ins), entry // (entries // ins)
    start = i * channel + tap // kernel_width * row_gap * line + tap % kernel_width * column_gap * pace
    left = cotangent + sample * c_n + o[:, None].to(tl.int64) * c_o
    right = input + sample * x_n + start[None, :]
    gradient = tl.zeros((OUTS, ENTRIES), dtype=tl.float32)
    for first in range(0, positions, POSITIONS):
        t = first + tl.arange(0, POSITIONS)
        place = t // width * row_stride * line + t % width * column_stride * pace
        a = tl.load(left + t[None, :].to(tl.int64) * c_t, mask=(t[None, :] < positions) & (o[:, None] < outs), other=0.0)
        b = tl.load(right + place[:, None], mask=(t[:, None] < positions) & (entry[None, :] < entries), other=0.0)
        gradient = tl.dot(a, b, gradient, input_precision="tf32")
    tl.store(out + sample * tiles + tile, tl.sum(gradient * gradient))


@triton.jit
def mend(
    product, left, right, finite, samples, positions, outs, ins, p_o, p_i, l_n, l_t, l_o, r_n, r_t, r_i,
    SAMPLES: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """product[o, i] = sum over the samples with finite[n] of left[n, t, o] right[n, t, i]; nothing at all if all samples are finite.

    Left, right and product by their strides, which reach beyond 32 bits: the logits of one long text are 2^31 numbers. One program looks at
    all of `finite`, and computes one tile.
    """
    spoiled = 0
    for first in range(0, samples, SAMPLES):
        n = first + tl.arange(0, SAMPLES)
        spoiled += tl.sum(tl.where(tl.load(finite + n, mask=n < samples, other=1) == 0, 1, 0))
    if spoiled > 0:
        across = tl.cdiv(ins, INS)
        o = (tl.program_id(0) // across * OUTS + tl.arange(0, OUTS)).to(tl.int64)
        i = (tl.program_id(0) % across * INS + tl.arange(0, INS)).to(tl.int64)
        total = tl.zeros((OUTS, INS), dtype=tl.float32)
        for first in range(0, samples * positions, ROWS):
            row = first + tl.arange(0, ROWS)
            n, t = (row // positions).to(tl.int64), (row % positions).to(tl.int64)
            counts = (row < samples * positions) & (tl.load(finite + n, mask=n < samples, other=0) != 0)
            a = tl.load(left + (n * l_n + t * l_t)[None, :] + o[:, None] * l_o, mask=counts[None, :] & (o[:, None] < outs), other=0.0)
            b = tl.load(right + (n * r_n + t * r_t)[:, None] + i[None, :] * r_i, mask=counts[:, None] & (i[None, :] < ins), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        place = product + o[:, None] * p_o + i[None, :] * p_i
        tl.store(place, total, mask=(o[:, None] < outs) & (i[None, :] < ins))
