"""The benchmark scripts run on their smallest problems. No figure is checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CALLS = {
    "run.py": "--threads 1 --workloads tiny --methods plain,vmap_clip,psg_norm,psg_clip,psg_grad --repeats 1",
    "overhead.py": "--methods plain,vmap_clip,psg_clip_functional --repeats 2",
    "recurrent.py": "--threads 1 --kinds tanh --methods plain,psg_clip --samples 2 --steps 3 --repeats 1",
    "lifted.py": "--threads 1 --functions prelu,solve,kalman_filter --repeats 1",
    "composed.py": "--threads 1 --workloads tiny --repeats 1",
    "tangent_kernels.py": "--threads 1 --workloads tiny --repeats 1",
    "derived.py": "--threads 1 --problems indexed_table --repeats 1",
    "inside.py": "--threads 1 --problems forces --repeats 1",
    "breakdown.py": "--threads 1 --workloads tiny",
    "projections.py": "--threads 1 --workloads tiny --dims 8 --repeats 1",
    "roofline.py": "--workloads tiny,cnn,embedding --ops 2",
}


@pytest.mark.parametrize("script", CALLS)
def test_script_runs_and_writes_results(script: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = _python(script, CALLS[script], out)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["device"]
    if script == "run.py":  # table.py reads its results
        done = subprocess.run([sys.executable, str(BENCHMARKS / "table.py"), str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "| tiny |" in done.stdout


def test_peak_memory_is_measured_in_fresh_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = _python("run.py", "--threads 1 --workloads tiny --methods plain --repeats 1 --memory", out)
    assert done.returncode == 0, done.stderr
    assert out.read_text().count('"peak_bytes": ') == 1 and "null" not in out.read_text()


def test_micro_prints_a_table() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "micro.py"), "layer_norm_weight", "--threads", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "**" in done.stdout  # the best of a row


def _python(script: str, arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / script), *arguments.split(), "--out", str(out)], capture_output=True, text=True)
