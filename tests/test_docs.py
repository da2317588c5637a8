"""The code in the documents runs as printed: README, notebooks, the demo."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import psg
from psg.rules import _registry
from psg.testing import assert_trees_close

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# The processes that these tests start run on one thread, without warnings or windows.
SMALL = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MPLBACKEND": "agg"}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_readme(monkeypatch, tmp_path):
    """Every python block, one after the other in one namespace, with torch's own defaults."""
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    source = blocks((ROOT / "README.md").read_text(), "python")
    assert source
    namespace: dict = {"__name__": "readme"}
    for i, block in enumerate(source):
        if "opacus" not in block or importlib.util.find_spec("opacus"):  # the `bench` extra brings it
            exec(compile(block, f"README.md, python block {i + 1}", "exec"), namespace)


def test_readme_s_shapes():
    """The comments of the form `# [32, 32]` behind an expression are its shape."""
    torch.set_default_dtype(torch.float32)
    namespace: dict = {"__name__": "readme"}
    checked = 0
    for block in blocks((ROOT / "README.md").read_text(), "python")[:3]:
        exec(block, namespace)
        for expression, shape in re.findall(r"^(psg\.[^#=]*?)\s*# \[([\d, ]+)\]", block, re.MULTILINE):
            found = eval(expression, namespace)
            found = found if isinstance(found, (torch.Tensor, torch.Size)) else next(iter(found.values()))
            assert list(getattr(found, "shape", found)) == [int(side) for side in shape.split(",")], expression
            checked += 1
    assert checked >= 4


def test_readme_s_jacobians():
    """Outputs instead of losses: Jacobians and kernel are those of torch.func."""
    torch.set_default_dtype(torch.float32)
    namespace: dict = {"__name__": "readme"}
    source = blocks((ROOT / "README.md").read_text(), "python")
    for block in [source[0], *(block for block in source if "kernel = " in block)]:
        exec(block, namespace)
    model, x, params, J, kernel = (namespace[name] for name in ("model", "x", "params", "J", "kernel"))
    outputs = lambda p, x: torch.func.functional_call(model, p, (x[None],))[0]  # noqa: E731
    expected = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(params, x)
    assert_trees_close(J, expected, rtol=1e-4)
    flat = torch.cat([leaf.flatten(2) for leaf in expected.values()], -1)
    assert_trees_close(kernel, torch.einsum("nap,mbp->namb", flat, flat), rtol=1e-4)


def test_readme_s_unfolded_convolution():
    """The Outer over patches is the convolution's factor."""
    torch.set_default_dtype(torch.float32)
    namespace: dict = {"__name__": "readme"}
    source = blocks((ROOT / "README.md").read_text(), "python")
    for block in [source[0], *(block for block in source if "unfolded = " in block)]:
        exec(block, namespace)
    f, unfolded = (namespace[name] for name in ("f", "unfolded"))
    assert_trees_close(unfolded.materialize(), f.materialize().flatten(2), rtol=1e-4)


def test_readme_s_gradient_of_several_processes():
    """Clipped, added up over the processes (here one), noisy, divided."""
    torch.set_default_dtype(torch.float32)
    namespace: dict = {"__name__": "readme", "noise_multiplier": 0.5, "sample_rate": 0.25}
    source = blocks((ROOT / "README.md").read_text(), "python")
    for block in [source[0], *(block for block in source if "def private_gradient" in block)]:
        exec(block, namespace)
    out, x, y = (namespace[name] for name in ("out", "x", "y"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = namespace["private_gradient"](x, y, torch.Generator().manual_seed(0), 128)
    finally:
        torch.distributed.destroy_process_group()
    noisy = psg.tree.add_noise(out.grads, 0.5, generator=torch.Generator().manual_seed(0))
    assert_trees_close(found, {name: grad / 32 for name, grad in noisy.items()}, rtol=1e-5)


def test_readme_s_methods():
    """From a method to the call: the formulas that are not one call, against dense matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loss, params = psg.stateless(model, F.cross_entropy)
    n, lam, x, y = 7, 0.1, torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    g = psg.factored_grad(loss)(params, x, y)
    G = psg.tree.flatten(g)
    flat = lambda sums: psg.tree.flatten({name: leaf[None] for name, leaf in sums.items()})[0]  # noqa: E731
    eye = lambda k: lam * torch.eye(k, dtype=G.dtype)  # noqa: E731

    w = torch.linalg.solve(psg.tree.gram(g) / n + eye(n), torch.ones(n, dtype=G.dtype) / n)
    assert_trees_close(flat(psg.tree.weighted_sum(g, w)), torch.linalg.solve(G.T @ G / n + eye(G.shape[1]), G.mean(0)), rtol=1e-9)

    mean, second = moments = psg.tree.moments(g)
    assert_trees_close(flat(second), G.square().mean(0), rtol=1e-9)
    trace = n / (n - 1) * sum(leaf.sum() for leaf in moments.variance.values())
    signal = sum(leaf.square().sum() for leaf in mean.values()) - trace / n
    assert_trees_close(trace, G.var(0).sum(), rtol=1e-9)
    products = G @ G.T
    assert_trees_close(signal, (products.sum() - products.trace()) / (n * (n - 1)), rtol=1e-9)  # of different samples: unbiased

    mean_loss = lambda p: vmap(loss, (None, 0, 0))(p, x, y).mean()  # noqa: E731
    hessian = torch.func.hessian(lambda v: mean_loss(psg.tree.unflatten(v, params)))(flat(params))
    v = torch.randn(G.shape[1], dtype=G.dtype)
    product = torch.func.jvp(torch.func.grad(mean_loss), (params,), (psg.tree.unflatten(v, params),))[1]
    assert_trees_close(flat(product), hessian @ v, rtol=1e-9)

    micro = psg.tree.clip(psg.tree.segment_sum(g, torch.arange(n) // 2, 4), 2 * 0.5)
    means = torch.stack([rows.sum(0) / 2 for rows in G.split(2)])
    expected = ((0.5 / means.norm(dim=1)).clamp(max=1)[:, None] * means).sum(0)
    assert_trees_close(flat(micro.grads) / 2, expected, rtol=1e-9)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path, monkeypatch, tmp_path):
    for name, value in {**SMALL, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code"), "commit it with its outputs"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()


def test_there_are_notebooks():
    assert NOTEBOOKS and NOTEBOOKS[0].name.startswith("01_")


def run(*arguments, cwd):
    env = {**os.environ, **SMALL, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo(tmp_path):
    """A few steps of `python -m psg.demo`: it checks, times, trains and draws."""
    out = run("-m", "psg.demo", "--steps", "3", "--repeats", "1", "--out", "picture.png", cwd=tmp_path)
    for part in ("check", "time", "psg.clipped_grad", "vmap(grad)", "loop", "test accuracy", "picture.png"):
        assert part in out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_import_needs_torch_and_optree_alone(tmp_path):
    """The extras stay extras: importing psg and its oracle loads none of them."""
    extras = ["hypothesis", "matplotlib", "sklearn", "pytest", "transformers"]
    code = f"import sys, psg, psg.testing; print([name for name in {extras} if name in sys.modules])"
    assert run("-c", code, cwd=tmp_path).strip() == "[]"


def test_public_names_are_documented():
    """The README names every public function of psg, psg.tree and psg.distributed."""
    readme = (ROOT / "README.md").read_text()
    names = [name for name in psg.__all__ if callable(getattr(psg, name)) and not issubclass(type(getattr(psg, name)), type)]
    for room in (psg.tree, psg.distributed):
        own = [name for name, value in vars(room).items() if getattr(value, "__module__", "").startswith(room.__name__)]
        assert room.__all__ == sorted(name for name in own if not name.startswith("_"))
        names += [f"{room.__name__.removeprefix('psg.')}.{name}" for name in room.__all__]
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", readme)]
    assert not missing


def documented(function):
    """The arguments that a docstring describes, and the text for each."""
    section = re.search(r"^Args:\n(.*?)(?=^\S)", inspect.getdoc(function), re.MULTILINE | re.DOTALL)
    return {name: text.split() for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \S|\Z)", section[1], re.MULTILINE | re.DOTALL)}


def test_shared_options_have_one_text():
    """Each transform describes all its arguments, and an argument that several have is described in the same words."""
    transforms = (psg.per_sample_grad, psg.per_sample_value_and_grad, psg.per_sample_norm, psg.factored_grad, psg.clipped_grad, psg.explain)
    texts = {}
    for transform in (*transforms, psg.tree.clip):
        own = documented(transform)
        assert list(own) == list(inspect.signature(transform).parameters), transform.__name__
        for name, text in own.items():
            if transform is not psg.tree.clip or name == "clip_norm":
                assert texts.setdefault(name, text) == text, (transform.__name__, name)
    assert len(texts) == 9


def test_readme_s_table_names_tests_that_exist():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("### What works") : text.index("### Edge cases")]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) >= 25
    for row in rows:
        file = ""
        named = re.findall(r"`([\w.]*)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for where, test in named:
            file = where or file
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, test)
