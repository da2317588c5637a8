"""Makes the README's table, and its plot where matplotlib is there, from the JSON of run.py.

    python benchmarks/table.py results/cpu-4.json [more.json ...] [--plot results/cpu-4.png]

One row a workload. For each kind of result: psg's time as a ratio to plain training of the same model, and beside it
the fastest method of anyone else that was right, by name. Several files of one device (a merged peer, another set of
workloads) become one table; files of different devices or thread counts become one table each.
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
    return report["device"], report["threads"], report["dtype"]


def with_peaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their ratio of peak memory in place of their ratio of time."""
    plain = {row["workload"]: row.get("peak_bytes") for row in rows if row["method"] == "plain"}
    return [
        {**row, "ratio": row["peak_bytes"] / plain[row["workload"]]} for row in rows if row.get("peak_bytes") and plain.get(row["workload"])
    ]


def best(rows: list[dict[str, Any]], workload: str, kind: str, ours: bool) -> dict[str, Any] | None:
    """The fastest right row of a kind, of psg or of everyone else.

    A clipped sum needs the norms, so for norms a method of clipping does not count; each kind stands for itself.
    """
    found = [
        row
        for row in rows
        if (row["workload"], row["kind"]) == (workload, kind) and "ratio" in row
        if row["method"].startswith("psg_") is ours and (ours or not row["method"].startswith(NOT_PEERS))
    ]
    return min(found, key=lambda row: row["ratio"], default=None)


def markdown(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "psg")
    head = f"{report['device']}, {report['threads']} threads, {report['dtype']}; {versions}; {report['date']}."
    lines = [head, ""]
    lines.append("| workload | plain | " + " | ".join(f"psg {text} | best other" for text in KINDS.values()) + " |")
    lines.append("|---|---|" + "---|---|" * len(KINDS))
    for workload in dict.fromkeys(row["workload"] for row in rows):
        plain = next((r for r in rows if (r["workload"], r["method"]) == (workload, "plain") and "ms" in r), None)
        cells = [workload, f"{plain['ms']:.1f} ms" if plain else ""]
        for kind in KINDS:
            psg, other = best(rows, workload, kind, True), best(rows, workload, kind, False)
            text = f"{psg['ratio']:.2f}" if psg else "-"
            cells.append(f"**{text}**" if psg and other and psg["ratio"] <= other["ratio"] else text)
            cells.append(f"{other['ratio']:.2f} {other['method']}" if other else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel a kind: psg's bar and the best other's for every workload, on a log scale."""
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
        for offset, ours, color in ((-0.2, True, "tab:blue"), (0.2, False, "lightgray")):
            for y, workload in enumerate(workloads):
                row = best(rows, workload, kind, ours)
                if row:
                    panel.barh(y + offset, row["ratio"], 0.4, color=color, label="psg" if ours else "best other")
                    panel.text(row["ratio"], y + offset, f" {row['ratio']:.2f}", va="center", fontsize=7)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(title=title, xscale="log", xlabel="time / plain training")
    panels[0].set_yticks(range(len(workloads)), workloads)
    panels[0].invert_yaxis()
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower right", ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
