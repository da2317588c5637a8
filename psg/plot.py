"""Pictures of per-sample gradients. Needs matplotlib, which the `demo` extra brings.

Every function draws on an `Axes` that you pass, so you decide where pictures go; `page` makes a figure without a
window, outside matplotlib's global state.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

# Blue, orange and green of equal weight, which stay apart for colour-blind readers and in grey.
_COLOURS = ("#2166ac", "#e08214", "#4d9221")
_LINE = "#404040"


def page(columns: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure of axes side by side, in one style.

    Args:
        columns: number of axes.
        width: width of each, in inches.
        height: height of each, in inches.

    Returns:
        The figure and its axes, from left to right.

    Example:
        >>> figure, axes = page(columns=2)
        >>> len(axes)
        2
    """
    figure = Figure(figsize=(columns * width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, k + 1) for k in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file, and make the folders it needs.

    Args:
        figure: what `page` returned.
        path: the file; its suffix chooses the format.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def norm_histogram(ax: Axes, norms: Mapping[str, Tensor], clip_norm: float | None = None, bins: int = 40) -> None:
    """Histogram of gradient norms on a logarithmic axis, with a line at the clip norm.

    Args:
        ax: where to draw.
        norms: for each label the norms [n] of its samples; zeros and values that are not finite do not fit on
            the axis and are left out.
        clip_norm: where to draw the line; None draws none.
        bins: number of bins, shared by all labels.

    Example:
        >>> figure, (ax,) = page()
        >>> norm_histogram(ax, {"all samples": torch.tensor([0.5, 1.0, 2.0])}, clip_norm=1.0)
        >>> ax.get_xscale()
        'log'
    """
    shown = {label: _on_log_axis(values) for label, values in norms.items()}
    found = torch.cat([*shown.values(), torch.ones(0)])
    low, high = (found.min().item(), found.max().item()) if len(found) else (0.1, 10.0)
    # A little room at both ends, which also keeps the bins of equal norms apart.
    edges = torch.logspace(math.log10(low) - 0.05, math.log10(high) + 0.05, bins + 1).tolist()
    for (label, values), colour in zip(shown.items(), _cycle(len(shown)), strict=True):
        ax.hist(values.tolist(), edges, label=label, color=colour, alpha=0.6)
    if clip_norm is not None:
        ax.axvline(clip_norm, color=_LINE, linestyle="--", label=f"clip norm {clip_norm:g}")
    ax.set_xscale("log")
    ax.set_xlabel("norm of one sample's gradient")
    ax.set_ylabel("samples")
    ax.legend(frameon=False)


def accuracy_by_step(ax: Axes, steps: Sequence[int], accuracy: Mapping[str, Sequence[float]]) -> None:
    """Accuracy against training step, one line for each label.

    Args:
        ax: where to draw.
        steps: the steps at which accuracy was measured.
        accuracy: for each label its accuracies, between 0 and 1, one for each of `steps`.

    Example:
        >>> figure, (ax,) = page()
        >>> accuracy_by_step(ax, [0, 10], {"test": [0.1, 0.9]})
        >>> len(ax.lines)
        1
    """
    for (label, values), colour in zip(accuracy.items(), _cycle(len(accuracy)), strict=True):
        ax.plot(list(steps), list(values), label=label, color=colour, linewidth=2)
    ax.set_ylim(0, 1)
    ax.set_xlabel("step")
    ax.set_ylabel("accuracy")
    ax.legend(frameon=False, loc="lower right")


def _on_log_axis(values: Tensor) -> Tensor:
    values = values.detach().float().cpu().flatten()
    return values[values.isfinite() & (values > 0)]


def _cycle(count: int) -> list[str]:
    return [_COLOURS[k % len(_COLOURS)] for k in range(count)]
