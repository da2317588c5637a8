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
def _conv_tile(
    cotangent, input, first_out, first_entry, positions, height, width, out_width, outs, ins, entries,
    row_stride, column_stride, top, left, kernel_width, row_gap, column_gap, c_o, c_t, channel, line, pace,
    LAST: tl.constexpr, ONE_TAP: tl.constexpr, OUTS: tl.constexpr, ENTRIES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """One tile of the weight gradient of the sample at whose first entries `cotangent` and `input` point, in registers.

    gradient[o, (i k)] = sum_t cotangent[o, t] input[i, stride t + dilation k - padding].

    Args: the cotangent by its strides c_o, c_t, which reach beyond 32 bits if it is part of a larger tensor; the input, of height x width
    pixels, from channel to channel `channel`, from line to line `line` and from pixel to pixel `pace` apart. Entries are numbered with the
    channels innermost if LAST, and outermost otherwise: as memory is. If ONE_TAP, all entries of a tile belong to one tap of the kernel,
    and what it reads outside of the input counts as zero; otherwise padding is part of the input, and `top` and `left` are zero.
    """
    o = first_out + tl.arange(0, OUTS)
    entry = first_entry + tl.arange(0, ENTRIES)
    if ONE_TAP:
        tap = first_entry // ins
        i = entry - tap * ins
    elif LAST:
        tap, i = entry // ins, entry % ins
    else:
        tap, i = entry % (entries // ins), entry // (entries // ins)
    row = tap // kernel_width * row_gap - top
    column = tap % kernel_width * column_gap - left
    start = i * channel + row * line + column * pace
    gradient = tl.zeros((OUTS, ENTRIES), dtype=tl.float32)
    for first in range(0, positions, POSITIONS):
        t = first + tl.arange(0, POSITIONS)
        y = t // out_width * row_stride
        x = t % out_width * column_stride
        inside = t < positions
        if ONE_TAP:
            inside = inside & (y + row >= 0) & (y + row < height) & (x + column >= 0) & (x + column < width)
        places = cotangent + o[:, None].to(tl.int64) * c_o + t[None, :].to(tl.int64) * c_t
        a = tl.load(places, mask=(t[None, :] < positions) & (o[:, None] < outs), other=0.0)
        b = tl.load(input + start[None, :] + (y * line + x * pace)[:, None], mask=inside[:, None] & (entry[None, :] < entries), other=0.0)
        gradient = tl.dot(a, b, gradient, input_precision="tf32")
    return gradient


@triton.jit
def conv_norms(
    cotangent, input, out, tiles, positions, height, width, out_width, outs, ins, entries,
    row_stride, column_stride, top, left, kernel_width, row_gap, column_gap, c_n, c_o, c_t, x_n, channel, line, pace,
    LAST: tl.constexpr, ONE_TAP: tl.constexpr, OUTS: tl.constexpr, ENTRIES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """out[n, tile] = the squares of one tile of the weight gradient of sample n, added up; for the arguments see `_conv_tile`."""
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    across = tl.cdiv(entries, ENTRIES)
    gradient = _conv_tile(
        cotangent + sample * c_n, input + sample * x_n, tile // across * OUTS, tile % across * ENTRIES,
        positions, height, width, out_width, outs, ins, entries,
        row_stride, column_stride, top, left, kernel_width, row_gap, column_gap, c_o, c_t, channel, line, pace,
        LAST, ONE_TAP, OUTS, ENTRIES, POSITIONS,
    )  # fmt: skip
    tl.store(out + sample * tiles + tile, tl.sum(gradient * gradient))


@triton.jit(do_not_specialize=["samples", "each"])
def conv_sums(
    cotangent, input, weights, out, samples, each, positions, height, width, out_width, outs, ins, entries,
    row_stride, column_stride, top, left, kernel_width, row_gap, column_gap, c_n, c_o, c_t, x_n, channel, line, pace,
    SKIPS: tl.constexpr, LAST: tl.constexpr, ONE_TAP: tl.constexpr, OUTS: tl.constexpr, ENTRIES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """out[part, o, (i k)] = sum over `each` samples of weights[n] gradient[n, o, (i k)]; for the arguments see `_conv_tile`.

    Every sample's gradient is multiplied by its weight where it lies, in float32. If SKIPS, samples of weight zero are not read.
    """
    across = tl.cdiv(entries, ENTRIES)
    first_out = tl.program_id(0) // across * OUTS
    first_entry = tl.program_id(0) % across * ENTRIES
    part = tl.program_id(1).to(tl.int64)
    total = tl.zeros((OUTS, ENTRIES), dtype=tl.float32)
    for sample in range(part * each, min(part * each + each, samples)):
        weight = tl.load(weights + sample)
        if not SKIPS or weight != 0:
            gradient = _conv_tile(
                cotangent + sample * c_n, input + sample * x_n, first_out, first_entry,
                positions, height, width, out_width, outs, ins, entries,
                row_stride, column_stride, top, left, kernel_width, row_gap, column_gap, c_o, c_t, channel, line, pace,
                LAST, ONE_TAP, OUTS, ENTRIES, POSITIONS,
            )  # fmt: skip
            total += weight * gradient
    o = first_out + tl.arange(0, OUTS)
    entry = first_entry + tl.arange(0, ENTRIES)
    place = out + part * outs * entries + o[:, None] * entries + entry[None, :]
    tl.store(place, total, mask=(o[:, None] < outs) & (entry[None, :] < entries))


@triton.jit
def _gram_tile(side, t, s, positions, size, x_t, x_i, ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """<side[t], side[s]> for rows t and s, [ROWS, ROWS], of a side [positions, size] by its strides."""
    gram = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for first in range(0, size, DEPTH):
        i = first + tl.arange(0, DEPTH)
        a = tl.load(side + t[:, None] * x_t + i[None, :] * x_i, mask=(t[:, None] < positions) & (i[None, :] < size), other=0.0)
        b = tl.load(side + s[None, :] * x_t + i[:, None] * x_i, mask=(s[None, :] < positions) & (i[:, None] < size), other=0.0)
        gram = tl.dot(a, b, gram, input_precision=PRECISION)
    return gram


@triton.jit
def gram_sums(
    left, right, out, pairs, positions, outs, ins, l_n, l_t, l_o, r_n, r_t, r_i,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over t and s, and over t = s, of <left_t, left_s> <right_t, right_s>: the parts of one pair of tiles -> out[n, pair, 2].

    The inner products are symmetric: only tiles with s <= t are computed, and those with s < t count twice.
    """
    sample = (tl.program_id(0) // pairs).to(tl.int64)
    pair = tl.program_id(0) % pairs
    row = 0
    while (row + 1) * (row + 2) // 2 <= pair:
        row += 1
    column = pair - row * (row + 1) // 2
    t = row * ROWS + tl.arange(0, ROWS)
    s = column * ROWS + tl.arange(0, ROWS)
    product = _gram_tile(left + sample * l_n, t, s, positions, outs, l_t, l_o, ROWS, DEPTH, PRECISION)
    product *= _gram_tile(right + sample * r_n, t, s, positions, ins, r_t, r_i, ROWS, DEPTH, PRECISION)
    place = out + (sample * pairs + pair) * 2
    tl.store(place, tl.sum(product) * tl.where(row == column, 1.0, 2.0))
    tl.store(place + 1, tl.sum(tl.where(t[:, None] == s[None, :], product, 0.0)))


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
