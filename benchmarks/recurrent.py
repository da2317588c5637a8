"""Measures recurrent layers: whole models by method, and the ways to compute the gate cotangents of an LSTM.

    python benchmarks/recurrent.py --kinds lstm,gru,tanh --threads 4 --out results/recurrent.json

The model is an embedding 1000 x 64, a layer 64 -> 128 over T = 64 steps, and a linear classifier on the last output, n = 64. The
per-sample gradient of a recurrent layer's weights is a product over time of its gates' cotangents with the gates' inputs. Only the
cotangents are hard to get; there are four ways:

    written out    a loop over time that keeps the gates, and a loop back: what psg does
    recomputed     the native kernel forward; the gates recomputed by one product over all steps, and the same loop back
    identity       the native kernel with W_ih x + b as its input and an identity as input weight; the cotangent of that input
    tapped         the recurrence written in elementwise ops under autograd; the cotangents of its gates

For comparison, the native kernel runs forward and backward with all summed weight gradients, which gives no gate's cotangent.
Each way is checked against `tapped` before it is timed; times are medians of interleaved calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import peers  # noqa: F401  (registers the other libraries' methods)
import torch
import torch.nn.functional as F
from methods import METHODS
from reference import TOLERANCE, Reference
from run import median_ms, options, set_up, write
from torch import Tensor, nn
from workloads import Workload

VOCABULARY, WIDTH, HIDDEN, CLASSES = 1000, 64, 128, 2
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "lstm2": lambda *sizes, **options: nn.LSTM(*sizes, num_layers=2, bidirectional=True, **options),
}


class Classifier(nn.Module):
    """An embedding, a recurrent layer, and a linear classifier on its last output."""

    def __init__(self, kind: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = KINDS[kind](WIDTH, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN * (1 + self.layer.bidirectional), CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids))[0][:, -1])


def build(kind: str, args: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    batch = torch.randint(VOCABULARY, (args.samples, args.steps)), torch.randint(CLASSES, (args.samples,))
    return Workload(Classifier(kind).to(args.device), F.cross_entropy, tuple(x.to(args.device) for x in batch))


def main() -> None:
    parser = options(__doc__, samples=64, steps=64, threads=torch.get_num_threads(), repeats=25, device="cpu")
    parser.add_argument("--kinds", default="lstm,gru,tanh,lstm2", help=f"any of {', '.join(KINDS)}")
    parser.add_argument("--methods", default="plain,psg_clip,psg_norm,psg_grad,opacus_hooks", help="methods of methods.py and peers.py")
    args = parser.parse_args()
    set_up(args)
    ways = measure_ways(args)
    models = {kind: measure_model(kind, args) for kind in args.kinds.split(",")}
    write(args, samples=args.samples, steps=args.steps, ways=ways, models=models)


def measure_model(kind: str, args: argparse.Namespace) -> dict[str, dict[str, float | str]]:
    """Milliseconds and the ratio to plain training, by method; or its status, if a method is missing, refused or wrong."""
    reference = Reference(build(kind, args))
    rows: dict[str, dict[str, float | str]] = {}
    calls = {}
    for name in args.methods.split(","):
        if not METHODS[name].installed:
            rows[name] = {"status": "missing"}
            continue
        call = METHODS[name].prepare(build(kind, args), reference.clip_norm)
        try:
            error = reference.error(METHODS[name].kind, call())
        except RuntimeError as reason:  # a peer may have no rule for a kind
            rows[name] = {"status": "refused", "reason": str(reason).splitlines()[0]}
            continue
        rows[name] = {"status": "ok" if error < TOLERANCE[torch.float32] else "wrong", "error": error}
        if rows[name]["status"] == "ok":
            calls[name] = call
    times = median_ms(calls, args)
    print(f"\n### {kind}: n = {args.samples}, T = {args.steps}, {args.threads} threads\n\n| method | ms | x plain |\n|---|---|---|")
    for name, row in rows.items():
        if name in times:
            row |= {"ms": times[name], "ratio": times[name] / times["plain"]}
            print(f"| {name} | {row['ms']:.1f} | {row['ratio']:.2f} |", flush=True)
        else:
            print(f"| {name} | {row['status']} | |")
    return rows


# The ways


def measure_ways(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds that each way takes from a layer's input and output cotangent to the cotangents of gates and input."""
    torch.manual_seed(0)
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True).to(args.device)
    x = torch.randn(args.samples, args.steps, WIDTH, device=args.device)
    cotangent = torch.randn(args.samples, args.steps, HIDDEN, device=args.device)
    calls = {name: (lambda way=way: way(layer, x, cotangent)) for name, way in WAYS.items()}
    expected = calls["tapped"]()
    for name, call in calls.items():
        if not all(torch.allclose(found, right, rtol=1e-3, atol=1e-4) for found, right in zip(call(), expected, strict=True)):
            raise SystemExit(f"{name} disagrees with tapped")
    calls["native, summed gradients only"] = lambda: native(layer, x, cotangent)
    times = median_ms(calls, args)
    print(f"### ways: LSTM {WIDTH} -> {HIDDEN}, n = {args.samples}, T = {args.steps}, {args.threads} threads\n\n| way | ms |\n|---|---|")
    for name, milliseconds in times.items():
        print(f"| {name} | {milliseconds:.1f} |", flush=True)
    return times


Way = Callable[[nn.LSTM, Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def written_out(layer: nn.LSTM, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    from psg.rules._gates import Lstm, Weights

    w_ih, w_hh, b_ih, b_hh = layer.parameters()
    run = Lstm(x, Weights(w_ih, w_hh, b_ih, b_hh, None), False)
    run.forward([x.new_zeros(len(x), HIDDEN)] * 2)
    run.backward(cotangent, [None, None])
    return run.c_input, run.c_input @ w_ih


@torch.no_grad()
def recomputed(layer: nn.LSTM, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    from psg.rules._gates import Lstm, Weights

    output, _ = layer(x)
    w_ih, w_hh, b_ih, b_hh = layer.parameters()
    run, first = Lstm(x, Weights(w_ih, w_hh, b_ih, b_hh, None), False), x.new_zeros(len(x), 1, HIDDEN)
    states, cells = torch.cat([first, output], 1), run.state_buffer(first[:, 0])
    before, after_c = run.read_write_views(states)[0], run.read_write_views(cells)[1]
    z = F.linear(x, w_ih, b_ih + b_hh).flatten(0, 1).addmm_(before.flatten(0, 1), w_hh.T).unflatten(0, x.shape[:2])
    i, f, g, o = z.chunk(4, 2)
    z[..., : 2 * HIDDEN].sigmoid_()
    g.tanh_()
    o.sigmoid_()
    torch.mul(i, g, out=after_c)
    for t in run.steps:
        after_c[:, t].addcmul_(f[:, t], cells[:, t])
    run.saved = [states, cells, z, after_c.tanh(), g]
    run.backward(cotangent, [None, None])
    return run.c_input, run.c_input @ w_ih


def identity(layer: nn.LSTM, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh = (parameter.detach() for parameter in layer.parameters())
    z = F.linear(x, w_ih, b_ih + b_hh).requires_grad_()
    state = [x.new_zeros(1, len(x), HIDDEN)] * 2
    output, *_ = torch.lstm(z, state, [torch.eye(len(w_ih), device=x.device), w_hh], False, 1, 0.0, True, False, True)
    (gates,) = torch.autograd.grad(output, z, cotangent)
    return gates, gates @ w_ih


def tapped(layer: nn.LSTM, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh = (parameter.detach() for parameter in layer.parameters())
    h = c = x.new_zeros(len(x), HIDDEN)
    gates, outputs = [], []
    for z in F.linear(x, w_ih, b_ih + b_hh).requires_grad_().unbind(1):
        gates.append(torch.addmm(z, h, w_hh.T))
        i, f, g, o = gates[-1].chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    found = torch.stack(torch.autograd.grad(outputs, gates, list(cotangent.unbind(1))), 1)
    return found, found @ w_ih


def native(layer: nn.LSTM, x: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], cotangent)


WAYS: dict[str, Way] = {"written out": written_out, "recomputed": recomputed, "identity": identity, "tapped": tapped}


if __name__ == "__main__":
    main()
