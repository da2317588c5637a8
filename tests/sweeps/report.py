"""Runs a whole sweep on several processes and prints its table."""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from cases import Problem
from conftest import as_large

from sweeps.outcome import FAILURES, LEFT_OUT, REFUSED, RUNGS, TORCH, Outcome, settle

SHOWN = 4
COLUMNS = (*RUNGS, REFUSED, LEFT_OUT, TORCH, *FAILURES)


class Trial(NamedTuple):
    """One problem of a sweep: how to build it, first of all and in other ways for where the loop cannot run that."""

    label: str
    ways: list[Callable[[], Problem]]

    def settle(self) -> Outcome:
        return settle(build() for build in self.ways)


class Record(NamedTuple):
    """What came of the trials of one op or module."""

    name: str
    outcomes: dict[str, Outcome]
    seconds: float


def run(trials: Callable[[str, torch.dtype], Iterable[Trial]], name: str, dtype: torch.dtype, large: bool) -> Record:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if large:
        as_large(pytest.MonkeyPatch())
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own sample inputs
        outcomes = {trial.label: trial.settle() for trial in trials(name, dtype)}
    return Record(name, outcomes, time.perf_counter() - start)


def report(title: str, names: Callable[[torch.dtype], list[str]], trials: Callable[[str, torch.dtype], Iterable[Trial]]) -> None:
    """The command line of a sweep; exits with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="full names")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--large", action="store_true", help="as if no parameter were small: all rules run, and values are computed once")
    parser.add_argument("--json", help="write every outcome to this file")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    chosen = args.only or names(dtype)
    totals: Counter = Counter()
    records = []
    print(f"{'name':46}" + "".join(f"{column:>9}" for column in COLUMNS) + f"{'s':>7}")
    with ProcessPoolExecutor(args.jobs) as pool:
        for record in pool.map(run, [trials] * len(chosen), chosen, [dtype] * len(chosen), [args.large] * len(chosen)):
            records.append(record)
            counts = Counter(outcome.status for outcome in record.outcomes.values())
            totals += counts
            print(f"{record.name:46}" + "".join(f"{counts[column]:9}" for column in COLUMNS) + f"{record.seconds:7.1f}", flush=True)
            shown = [(label, outcome) for label, outcome in record.outcomes.items() if outcome.failed or outcome.status == TORCH]
            for label, outcome in shown[:SHOWN]:
                print(f"    {outcome.status}: {label}: {outcome.reason}", flush=True)
            if len(shown) > SHOWN:
                print(f"    and {len(shown) - SHOWN} more")
    print(f"{len(records)} names, {totals.total()} problems: " + ", ".join(f"{column} {totals[column]}" for column in COLUMNS))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({record.name: record.outcomes for record in records}, file, indent=1)
    sys.exit(any(totals[status] for status in FAILURES))
