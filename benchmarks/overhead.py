"""Measures the fixed cost of a call, on a model so small (two linear layers, n = 4) that arithmetic takes no time.

    python benchmarks/overhead.py --out results/overhead.json
    python benchmarks/overhead.py --profile psg_clip      where one method's time goes

Microseconds a call on one thread, medians of bursts of calls, as in a training loop. A call right after another library's takes longer
by what it waits for its own code to come back into the processor's caches (`--burst 1`).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics

import peers  # noqa: F401  (registers the other libraries' methods)
from methods import METHODS, TRANSFORMS, functional, method, psg_by
from reference import Reference
from run import check, interleave, options, set_up, write
from workloads import build

DEFAULT = (
    "plain,loop,vmap_grad,vmap_norm,vmap_clip,psg_grad,psg_norm,psg_clip,psg_grad_functional,psg_norm_functional,psg_clip_functional,"
    "opacus_hooks,opacus_ghost_clip,backpack_grad"
)
for _kind, _transform in TRANSFORMS.items():
    # Of the very function that `vmap` gets. That of `psg.stateless`, which the other methods take, also looks for changes of the module.
    method(f"psg_{_kind}_functional", _kind, needs="psg")(psg_by(_transform, pure=functional))


def main() -> None:
    parser = options(__doc__, methods=DEFAULT, repeats=40, device="cpu")
    parser.add_argument("--burst", type=int, default=20, help="calls of one method in a row")
    parser.add_argument("--profile", metavar="METHOD", help="print the functions that take this method's time")
    args = parser.parse_args()
    args.threads, args.limit = 1, 1
    set_up(args)
    if args.profile:
        profile(args.profile, args)
        return
    reference = Reference(build("tiny", args.device))
    rows = {name: check(METHODS[name], "tiny", reference, None, args)[0] for name in args.methods.split(",")}
    calls = {
        name: METHODS[name].prepare(build("tiny", args.device), reference.clip_norm) for name, row in rows.items() if row["status"] == "ok"
    }
    for name, seconds in interleave(calls, args.repeats, args.device, args.burst).items():
        rows[name]["us"] = round(1e6 * statistics.median(seconds), 1)
    for name, row in rows.items():
        print(f"{name:<20}" + (f"{row['us']:>10.0f} us" if "us" in row else f"{row['status']:>13}"))
    write(args, results=rows)


def profile(name: str, args: argparse.Namespace) -> None:
    """Prints the Python functions that one method spends its time in, over many calls."""
    workload = build("tiny", args.device)
    call = METHODS[name].prepare(workload, 1.0)
    call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(args.repeats * args.burst):
        call()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
