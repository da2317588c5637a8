"""psg on small models of many `transformers` architectures, held to the loop.

    python -m sweeps.architectures [--only NAME ...] [--json FILE]

prints, for each: which rung of the ladder ran it, the largest relative error of a per-sample gradient in float64, the number of
parameters, and the time of `per_sample_grad` and of the loop; and below the table why a rung could not run it.
Exits with 1 if one is wrong.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import psg
from psg.testing import Mismatch, loop_value_and_grad
from sweeps.models import Architecture, architectures


class Result(NamedTuple):
    """What came of one architecture."""

    name: str
    kind: str
    rung: str = "-"
    error: float = float("nan")
    parameters: int = 0
    seconds: float = 0.0
    loop_seconds: float = 0.0
    reasons: tuple[tuple[str, str], ...] = ()
    remark: str = ""
    wrong: bool = True


def check(architecture: Architecture) -> Result:
    """Hold one architecture to the loop: values, gradients and their reductions."""
    fn, params, batch = architecture.build()
    count = sum(parameter.numel() for parameter in params.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = psg.explain(fn)(params, *batch)
        result = Result(
            architecture.name,
            architecture.kind,
            report.rung,
            parameters=count,
            seconds=_time(psg.per_sample_grad(fn), params, *batch),
            loop_seconds=_time(loop_value_and_grad(fn), params, *batch),
            reasons=report.reasons,
        )
        try:
            return result._replace(error=psg.check(fn)(params, *batch).error, wrong=False)
        except Mismatch as mismatch:
            # Eager PyTorch, which the loop is, has wrong kernels; finite differences say who is right.
            return result._replace(remark=str(mismatch).replace("\n", " "), wrong="psg is nearer" not in str(mismatch))


def _time(fn: Callable, *args: Any) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_dtype(torch.float64)
    results = []
    print(f"{'architecture':16} {'kind':34} {'rung':8} {'error':>8} {'parameters':>10} {'psg s':>7} {'loop s':>7}")
    for architecture in architectures():
        if args.only and architecture.name not in args.only:
            continue
        try:
            result = check(architecture)
        except Exception as error:
            result = Result(architecture.name, architecture.kind, remark=f"{type(error).__name__}: {error}")
        results.append(result)
        print(
            f"{result.name:16} {result.kind:34} {result.rung:8} {result.error:8.1e} {result.parameters:10} "
            f"{result.seconds:7.3f} {result.loop_seconds:7.3f}{'  WRONG' if result.wrong else ''}  {result.remark}".rstrip(),
            flush=True,
        )
    for result in results:
        for rung, reason in result.reasons:
            print(f"{result.name}, not {rung}: {reason}")
    counts = {rung: sum(result.rung == rung for result in results) for rung in ("capture", "vmap", "loop")}
    wrong = sum(result.wrong for result in results)
    print(f"{len(results)} architectures: " + ", ".join(f"{rung} {count}" for rung, count in counts.items()) + f", wrong {wrong}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([result._asdict() for result in results], file, indent=1)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
