"""Shows where `clipped_grad` spends more time than plain training.

    python benchmarks/breakdown.py --workloads all --threads 4 --keep-pages --out results/breakdown_cpu_4threads.json

Two ratios to plain training:

    ops   time inside torch's ops, as summed by its profiler: the least that these ops can take. What exceeds 1 is spent on the norms'
          products, memory traffic (sums over positions, scaled factors) and shapes for which a library is less efficient.
    wall  wall-clock time. What exceeds `ops` is Python and dispatch.

It also lists the ops that take longer than in plain training, in milliseconds a call.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch
from methods import METHODS, Call
from run import options, set_up, write
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from workloads import WORKLOADS, build

PAIR = ("plain", "psg_clip")
WARM_UP, REPEATS = 20, 15


def main() -> None:
    args = options(__doc__, workloads="all", threads=torch.get_num_threads()).parse_args()
    args.device, args.repeats = "cpu", REPEATS
    set_up(args)
    rows = []
    for name in WORKLOADS if args.workloads == "all" else args.workloads.split(","):
        rows.append({"workload": name, **measure(name)})
        print(f"{name:>14}  ops {rows[-1]['ops']:.2f}  wall {rows[-1]['wall']:.2f}   {rows[-1]['more_ms']}")
    write(args, results=rows)


def measure(workload: str) -> dict[str, Any]:
    calls = {name: METHODS[name].prepare(build(workload, "cpu"), 1.0) for name in PAIR}
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in PAIR}
    inside: dict[str, Counter[str]] = {name: Counter() for name in PAIR}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
        for name, call in calls.items():
            inside[name].update(profile(call))
    plain, clip = (sum(inside[name].values()) for name in PAIR)
    more = {op: (inside["psg_clip"][op] - inside["plain"][op]) / REPEATS / 1e3 for op in inside["psg_clip"]}
    return {
        "ops": clip / plain,
        "wall": statistics.median(seconds["psg_clip"]) / statistics.median(seconds["plain"]),
        "plain_ms": 1e3 * statistics.median(seconds["plain"]),
        "more_ms": {op: round(ms, 2) for op, ms in sorted(more.items(), key=lambda item: -item[1])[:6] if ms >= 0.05},
    }


def profile(call: Call) -> Counter[str]:
    """Microseconds in each op, without the ops that it calls."""
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    times: Counter[str] = Counter()
    for event in profiler.events():
        # Leave out autograd nodes: their time includes the Python code of hooks.
        if event.name.startswith(("aten::", "mkldnn::", "psg::")):
            times[event.name] += event.self_cpu_time_total
    return times


if __name__ == "__main__":
    main()
