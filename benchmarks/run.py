"""Measures methods on workloads, side by side in one process, and writes JSON.

    python benchmarks/run.py --workloads mlp,cnn,gpt --methods default --threads 4 --repeats 15 --out results/NAME.json

Every method is checked against a loop over samples before it is timed, in float64 on the first samples and in the
dtype of the run on all of them. A method is not timed if it disagrees (status "wrong"), raises ("refused") or is not
installed ("missing"), or if its per-sample gradients exceed --limit ("too large").
Then every repeat calls each method once, in a new random order, and the medians are reported with their ratio to
`plain`: eager forward and backward of the same model on the same batch. A timed call starts with the batch and ends
with the result (on a GPU, after synchronising). The result is held until the method's next call, except that per-sample
gradients are freed at once. With --memory each method also runs in three processes of its own, which report the peak of the
memory in use, model and batch included; the median counts. On a GPU, whose allocator counts, one more call reports it.

Several processes can compile at once and take turns with one device: give them the same file as --turns.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import peers  # noqa: F401  (registers the other libraries' methods)
import torch
from methods import METHODS, Method
from reference import TOLERANCE, Reference
from workloads import LARGE, WORKLOADS, build

import psg
from psg._hardware._memory import pages_are_kept

GROUPS = {
    "default": ["plain", "loop", "vmap_grad", "vmap_norm", "vmap_clip", "psg_grad", "psg_norm", "psg_clip"],
    "eager": [name for name in METHODS if not name.endswith(("_compiled", "_traced", "_graphs"))],
    "compiled": [name for name in METHODS if name == "plain" or name.endswith(("_compiled", "_jit", "_graphs"))],
    "all": list(METHODS),
}
DOUBLE_SAMPLES = 16  # batch size of the check in float64
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    args = parse_arguments()
    set_up(args)
    if args.peak:
        print(json.dumps(peak_memory(args.workloads[0], METHODS[args.methods[0]], args)))
        return
    rows = []
    for name in args.workloads:
        for row in measure(name, args):
            rows.append(row)
            print(f"  {name:>14} {line(row)}", file=sys.stderr)
    print(table(write(args, results=rows)))


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, threads=torch.get_num_threads(), repeats=15, device="cpu")
    names = ", ".join(WORKLOADS | LARGE)
    parser.add_argument("--workloads", default="mlp,cnn,gpt", help=f"names, or all for the first {len(WORKLOADS)}: {names}")
    parser.add_argument("--methods", default="default", help=f"names and groups: {', '.join([*GROUPS, *METHODS])}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tf32", action="store_true", help="float32 matrix products and convolutions in TF32")
    parser.add_argument("--memory", action="store_true", help="peak memory too, one process a method")
    parser.add_argument("--limit", type=float, default=4, help="the most GiB of per-sample gradients that are still computed")
    parser.add_argument("--no-double", action="store_true", help="check in the run's own dtype only")
    parser.add_argument("--turns", type=Path, help="a file: measure when no other process given it checks or measures")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)  # the process that --memory starts
    args = parser.parse_args()
    args.workloads = list(WORKLOADS) if args.workloads == "all" else args.workloads.split(",")
    args.methods = list(dict.fromkeys(m for name in args.methods.split(",") for m in GROUPS.get(name, [name])))
    for name in args.methods:
        if name not in METHODS:
            parser.error(f"unknown method {name!r}: choose from {', '.join([*GROUPS, *METHODS])}")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    if args.dtype == "float32":
        torch.backends.cudnn.allow_tf32 = args.tf32  # torch's default would run convolutions alone in TF32
    return args


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of options with these defaults, and of those that `set_up` and `write` know."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--keep-pages", action="store_true", help="keep freed memory in the process: psg.keep_pages()")
    parser.add_argument("--out", type=Path)
    return parser


def set_up(args: argparse.Namespace) -> None:
    """Sets the process up as the options of a script ask; without options for them, in float32 and with freed pages given back."""
    for option, default in (("dtype", "float32"), ("tf32", False), ("turns", None)):
        vars(args).setdefault(option, default)
    warnings.simplefilter("ignore")  # peers warn on every call; check() records the warnings that matter
    torch.set_num_threads(args.threads)
    if args.keep_pages and not psg.keep_pages():
        raise SystemExit("--keep-pages: this C library cannot")


def write(args: argparse.Namespace, **found: Any) -> dict[str, Any]:
    """Writes what was found, and everything that it depends on, to the file of `--out`, if there is one; returns both."""
    report = {**describe(args), **found}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Everything about the run on which the numbers depend."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "psg", "opacus", "backpack-for-pytorch", "fastDP", "optree"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(args.device),
        "threads": args.threads,
        "dtype": args.dtype + (" (TF32 products)" if args.tf32 else ""),
        "repeats": args.repeats,
        "pages": "kept" if pages_are_kept() else "given back",
        "versions": versions,
    }


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measure(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a method: its status, errors, times, ratio to plain, and peak memory if asked for."""
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled
        torch.compiler.reset()  # torch limits recompilations of a function, and all workloads share these functions
    reference = Reference(build(workload, args.device, DTYPES[args.dtype]))
    double = None if args.no_double else Reference(build(workload, args.device, torch.float64, DOUBLE_SAMPLES))
    rows, calls, held = {}, {}, {}
    with turn(args.turns, shared=True):
        for name in args.methods:
            rows[name] = {"workload": workload, "method": name, "kind": METHODS[name].kind}
            found, call, held[name] = check(METHODS[name], workload, reference, double, args)
            rows[name] |= found
            if found["status"] == "ok":
                calls[name] = call
            del call
            if args.turns:
                torch.cuda.empty_cache()  # for the other processes
    with turn(args.turns):
        times = interleave(calls, args.repeats, args.device)
        if args.memory and args.device.startswith("cuda"):
            # The memory of a CUDA graph is set aside when it is recorded.
            for name, call in ((name, call) for name, call in calls.items() if not name.endswith("_graphs")):
                rows[name]["peak_bytes"] = held[name] + peak_of(call, args.device)
    for name, seconds in times.items():
        rows[name]["ms"] = 1e3 * statistics.median(seconds)
        rows[name]["times_ms"] = [round(1e3 * s, 4) for s in seconds]
        if "plain" in times:
            rows[name]["ratio"] = statistics.median(seconds) / statistics.median(times["plain"])
    calls.clear()
    gc.collect()
    if args.memory and not args.device.startswith("cuda"):
        for name in times:
            peaks = [peak_in_fresh_process(workload, name, args) for _ in range(3)]
            rows[name]["peak_bytes"] = None if None in peaks else sorted(peaks)[1]
    return list(rows.values())


@contextlib.contextmanager
def turn(path: Path | None, shared: bool = False):
    """A context in which no other process with this file has a turn, unless both are shared."""
    if path is None:
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def check(method: Method, workload: str, reference: Reference, double: Reference | None, args) -> tuple[dict[str, Any], Any, int]:
    """The status of a method on a workload and its errors against the loop, its call, and the bytes that it holds on a GPU.

    A method that cannot compute in float64 at all is judged only in the dtype of the run.
    """
    if not method.installed:
        return {"status": "missing"}, None, 0
    if method.kind == "grad" and reference.result_bytes > args.limit * 2**30:
        return {"status": "too large"}, None, 0
    row: dict[str, Any] = {"status": "ok"}
    call, held = None, 0
    for label, ref in (("error_double", double), ("error", reference)):
        if ref is None:
            continue
        dtype = ref.norms.dtype
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                before = allocated(args.device)
                call = method.prepare(build(workload, args.device, dtype, ref.workload.num_samples), ref.clip_norm)
                held = allocated(args.device) - before
                result = call()
                row[label] = ref.error(method.kind, result)
                del result
            except Exception as error:  # a peer may raise anything; the row records it
                row[label], row["reason"] = None, f"{type(error).__name__}: {error}".splitlines()[0][:200]
        fallbacks = [str(w.message) for w in caught if w.category.__name__ == "FallbackWarning"]
        if fallbacks:
            row["fallback"] = fallbacks[0]
        if row[label] is not None and row[label] > (TOLERANCE[torch.bfloat16] if args.tf32 else TOLERANCE[dtype]):
            return {**row, "status": "wrong"}, None, 0
    return (row if row[label] is not None else {**row, "status": "refused"}), call, held


def interleave(calls: dict[str, Any], repeats: int, device: str, burst: int = 1) -> dict[str, list[float]]:
    """Seconds of every call. Each repeat calls every method `burst` times in a row, in a new random order, after two such to warm up.

    A method's result is held until its next call, as a training loop holds a step's gradient in `.grad`: to an allocator it matters
    whether memory is freed before or after other memory is requested. Only per-sample gradients, which can take gigabytes, are dropped
    at once.
    """
    order, draw = list(calls), random.Random(0)
    held: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):
        draw.shuffle(order)
        for name in (name for name in order for _ in range(burst)):
            synchronize(device)
            start = time.perf_counter()
            held.pop(name, None)
            result = calls[name]()
            synchronize(device)
            seconds = time.perf_counter() - start
            if name not in METHODS or METHODS[name].kind != "grad":
                held[name] = result
            del result
            if repeat >= 0:
                times[name].append(seconds)
    return times


def median_ms(calls: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """The median time of every call, in milliseconds."""
    return {name: 1e3 * statistics.median(seconds) for name, seconds in interleave(calls, args.repeats, args.device).items()}


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def allocated(device: str) -> int:
    """Bytes in use on a GPU."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0


def peak_of(call: Any, device: str) -> int:
    """The most bytes that a call has in use on a GPU at once, beside what was in use before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def peak_in_fresh_process(workload: str, method: str, args: argparse.Namespace) -> int | None:
    options = ["--workloads", workload, "--methods", method, "--threads", str(args.threads), "--device", args.device]
    options += ["--dtype", args.dtype, "--peak"] + ["--tf32"] * args.tf32 + ["--keep-pages"] * args.keep_pages
    done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def peak_memory(workload: str, method: Method, args: argparse.Namespace) -> int:
    """Bytes of resident memory at the peak of three calls, model and batch included.

    Minus what the process holds after one call on a tiny workload, so that lazily loaded code does not count.
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # ops of only some models load it, with all of sympy
    method.prepare(build("tiny", args.device, DTYPES[args.dtype]), 1.0)()
    synchronize(args.device)
    base = resident_bytes("VmRSS")
    call = method.prepare(build(workload, args.device, DTYPES[args.dtype]), 1.0)
    for _ in range(3):
        result = call()
        synchronize(args.device)
        del result
    return resident_bytes("VmHWM") - base


def resident_bytes(field: str) -> int:
    """Resident memory of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith(field)).split()[1])
    except OSError:
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def line(row: dict[str, Any]) -> str:
    """One row of the results as a line of text, printed during the run."""
    if row["status"] != "ok":
        errors = [row[key] for key in ("error_double", "error") if row.get(key) is not None]
        return f"{row['method']:<20} {row['status']} {row.get('reason', '')} {'; '.join(f'{e:.1e}' for e in errors)}"
    peak = f"  {row['peak_bytes'] / 2**20:8.0f} MiB" if row.get("peak_bytes") else ""
    fallback = "  (fell back)" if "fallback" in row else ""
    return f"{row['method']:<20} {row['ms']:10.2f} ms  x{row.get('ratio', float('nan')):.2f}{peak}{fallback}"


def table(report: dict[str, Any]) -> str:
    """One row a method, one column a workload: ratios to plain, with plain itself in milliseconds."""
    rows = report["results"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    cells = {(row["method"], row["workload"]): cell(row) for row in rows}
    width = max(10, *(len(name) + 2 for name in workloads))
    head = f"{report['device']}, {report['threads']} threads, {report['dtype']}: time as a ratio to plain (ms for plain)"
    text = [head, f"{'':<20}" + "".join(f"{name:>{width}}" for name in workloads)]
    for name in dict.fromkeys(row["method"] for row in rows):
        text.append(f"{name:<20}" + "".join(f"{cells.get((name, w), ''):>{width}}" for w in workloads))
    return "\n".join(text)


def cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return row["status"]
    return f"{row['ms']:.1f} ms" if row["method"] == "plain" or "ratio" not in row else f"{row['ratio']:.2f}"


if __name__ == "__main__":
    main()
