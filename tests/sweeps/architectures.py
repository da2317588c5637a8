"""psg on small models of many `transformers` architectures, held to the loop.

    python -m sweeps.architectures [--batch | --jit] [--only NAME ...] [--json FILE]

prints, for each: which rung of the ladder ran it, the largest relative error of a per-sample gradient in float64, the number of
parameters, and the time of `per_sample_grad` and of the loop; and below the table why a rung could not run it.
With --batch the whole batch goes through each model at once (method="batch"), and is held to psg sample by sample.
With --jit clipped gradients are traced to one graph, which is run as it is and held to eager calls.
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
from torch import Tensor

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


def check_batch(architecture: Architecture) -> Result:
    """Hold a weighted sum of what a model gives for a whole batch to that of its samples, whose gradients `check` holds to the loop."""
    model, batch = architecture.model_and_batch()
    tokens = batch[0]
    batch = {key: value for key, value in tokens.items() if key != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = tokens.get("input_ids", tokens["labels"]).clone()
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def losses(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        n = len(next(iter(batch.values())))
        outputs = torch.func.functional_call(model, params, (), batch).values()
        kept = [out for out in outputs if isinstance(out, Tensor) and out.is_floating_point() and out.ndim and len(out) == n][:2]
        return sum((out.reshape(n, -1).sin() * torch.arange(out[0].numel()).cos()).sum(1) for out in kept)  # pyright: ignore[reportReturnType]

    def loss(params: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return losses(params, {key: value[None] for key, value in sample.items()})[0]

    result = Result(architecture.name, architecture.kind, parameters=sum(p.numel() for p in params.values()), wrong=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = psg.per_sample_grad(losses, method="batch")(params, batch)
        except (psg.InputError, psg.StateError) as error:
            return result._replace(rung="refused", remark=str(error))
        expected = {name: value for name, value in psg.per_sample_grad(loss)(params, batch).items() if value.numel()}
    largest = max(1.0, *(float(value.abs().max()) for value in expected.values()))
    error = max(float((found[name] - value).abs().max()) / largest for name, value in expected.items())
    # Many models round to float32 somewhere, one way for a batch and another for a sample.
    return result._replace(rung="batch", error=error, wrong=error > 1e-6)


def check_jit(architecture: Architecture) -> Result:
    """Trace clipped gradients of one architecture; psg.jit itself holds what comes out to eager calls."""
    fn, params, batch = architecture.build()
    fast = psg.jit(psg.clipped_grad(fn, 1.0), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(params, *batch)
    (entry,) = fast.cache_info()
    result = Result(architecture.name, architecture.kind, "jit" if entry.error is None else "eager", seconds=entry.seconds)
    return result._replace(
        parameters=sum(p.numel() for p in params.values()), remark=entry.error or "", wrong="wrong" in (entry.error or "")
    )


def _time(fn: Callable, *args: Any) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", action="store_true", help="whole batches at once")
    parser.add_argument("--jit", action="store_true", help="traced")
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
            result = (check_batch if args.batch else check_jit if args.jit else check)(architecture)
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
    counts = {
        rung: sum(result.rung == rung for result in results) for rung in ("capture", "vmap", "loop", "batch", "refused", "jit", "eager")
    }
    wrong = sum(result.wrong for result in results)
    print(f"{len(results)} architectures: " + ", ".join(f"{rung} {count}" for rung, count in counts.items()) + f", wrong {wrong}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([result._asdict() for result in results], file, indent=1)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
