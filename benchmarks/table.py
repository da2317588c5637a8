"""Makes the main table of the README, and its plot if matplotlib is installed, from the JSON of run.py.

    python benchmarks/table.py results/cpu-4.json [more.json ...] [--plot results/cpu-4.png]

One row a workload. For each kind of result: psg's time as a ratio to plain training of the same model (and compiled, if
that was measured), and the fastest correct method that is not psg's, by name. Several files of one device
(results of a peer, another set of workloads) become one table; files of other devices or settings become one table each.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

KINDS = {"clip": "clipped sum", "norm": "norms", "grad": "per-sample gradients"}
NOT_PEERS = ("plain", "psg_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--memory", action="store_true", help="peak memory as a ratio to plain, instead of time")
    parser.add_argument("--plot", type=Path, help="write one PNG of the first table")
    args = parser.parse_args()
    reports = sorted((json.loads(path.read_text()) for path in args.files), key=conditions)
    for number, (_, group) in enumerate(groupby(reports, key=conditions)):
        merged = list(group)
        rows = [row for report in merged for row in report["results"]]
        print(markdown(merged[0], with_peaks(rows) if args.memory else rows))
        if args.plot and number == 0:
            plot(rows, args.plot)


def conditions(report: dict[str, Any]) -> tuple:
    return report["device"], report["threads"], report["dtype"], report.get("pages", "given back")


def with_peaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the ratio of peak memory in place of the ratio of time."""
    plain = {row["workload"]: row.get("peak_bytes") for row in rows if row["method"] == "plain"}
    return [
        {**row, "ratio": row["peak_bytes"] / plain[row["workload"]]} for row in rows if row.get("peak_bytes") and plain.get(row["workload"])
    ]


def own(rows: list[dict[str, Any]], workload: str, method: str) -> float | None:
    """The ratio of one method."""
    return next((row["ratio"] for row in rows if (row["workload"], row["method"]) == (workload, method) and "ratio" in row), None)


def best(rows: list[dict[str, Any]], workload: str, kind: str) -> dict[str, Any] | None:
    """The row of the fastest correct method of a kind that is not psg's.

    Methods of other kinds do not count: a clipping method computes norms too, but is no method for norms.
    """
    found = [
        row
        for row in rows
        if (row["workload"], row["kind"]) == (workload, kind) and "ratio" in row and not row["method"].startswith(NOT_PEERS)
    ]
    return min(found, key=lambda row: row["ratio"], default=None)


def markdown(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "psg")
    pages = ", pages kept" if report.get("pages") == "kept" else ""
    lines = [f"{report['device']}, {report['threads']} threads, {report['dtype']}{pages}; {versions}; {report['date']}.", ""]
    compiled = [kind for kind in KINDS if any(row["method"] == f"psg_{kind}_jit" for row in rows)]
    columns = ["workload", "plain"]
    for kind, text in KINDS.items():
        columns += [f"psg {text}", *["compiled"] * (kind in compiled), "best other"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        plain = next((r for r in rows if (r["workload"], r["method"]) == (workload, "plain") and "ms" in r), None)
        cells = [workload, f"{plain['ms']:.1f} ms" if plain else ""]
        for kind in KINDS:
            other = best(rows, workload, kind)
            for method in (f"psg_{kind}", *[f"psg_{kind}_jit"] * (kind in compiled)):
                ratio = own(rows, workload, method)
                text = "-" if ratio is None else f"{ratio:.2f}"
                cells.append(f"**{text}**" if ratio is not None and other and ratio <= other["ratio"] else text)
            cells.append(f"{other['ratio']:.2f} {other['method']}" if other else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel a kind: for every workload, psg's bars and that of the best other method, on a log scale."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, panels = plt.subplots(1, len(KINDS), figsize=(4 * len(KINDS), 0.45 * len(workloads) + 1.5), sharey=True)
    for panel, (kind, title) in zip(panels, KINDS.items(), strict=True):
        for y, workload in enumerate(workloads):
            other = best(rows, workload, kind)
            bars = {
                "psg": (own(rows, workload, f"psg_{kind}"), "tab:blue"),
                "psg, compiled": (own(rows, workload, f"psg_{kind}_jit"), "tab:cyan"),
                "best other": (other and other["ratio"], "lightgray"),
            }
            for offset, (label, (ratio, color)) in zip((-0.27, 0, 0.27), bars.items(), strict=True):
                if ratio:
                    panel.barh(y + offset, ratio, 0.27, color=color, label=label)
                    panel.text(ratio, y + offset, f" {ratio:.2f}", va="center", fontsize=6)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(title=title, xscale="log", xlabel="time / plain training")
        panel.set_xlim(0.5, 1.7 * panel.get_xlim()[1])
    panels[0].set_yticks(range(len(workloads)), workloads)
    panels[0].invert_yaxis()
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
