"""The benchmark scripts run, on the smallest of what they measure. No figure is looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CALLS = {
    "run.py": ["--workloads", "tiny", "--methods", "plain,vmap_clip,psg_norm,psg_clip,psg_grad", "--repeats", "1"],
    "overhead.py": ["--repeats", "2"],
    "recurrent.py": ["--kinds", "tanh", "--methods", "plain,psg_clip", "--samples", "2", "--steps", "3", "--repeats", "1"],
    "lifted.py": ["--repeats", "1"],
    "breakdown.py": ["--workloads", "tiny"],
    "projections.py": ["--workloads", "tiny", "--dims", "8", "--repeats", "1"],
    "roofline.py": ["--workloads", "tiny,cnn,gpt,embedding", "--ops", "2"],
}


@pytest.mark.parametrize("script", CALLS)
def test_script_runs_and_writes_results(script: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = _python(script, *CALLS[script], "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["device"]


def test_table_reads_what_run_writes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert _python("run.py", *CALLS["run.py"], "--out", str(out)).returncode == 0
    done = _python("table.py", str(out))
    assert done.returncode == 0, done.stderr
    assert "| tiny |" in done.stdout


def test_peak_memory_is_measured_in_fresh_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = _python("run.py", "--workloads", "tiny", "--methods", "plain,psg_clip", "--repeats", "1", "--memory", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_text().count('"peak_bytes": ') == 2 and "null" not in out.read_text()


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True)
