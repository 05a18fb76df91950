"""`bench comm` on a Ray cluster of two hosts, and on hosts of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.bench.hosts import cluster_of, environment, why_not
from tests.cluster.nodes import start_ray

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

RECIPE = ("model.name=resnet18", "data.image_size=32", "train.micro_batch_size=4", "train.precision=fp32")


def test_strategies_on_a_cluster(tmp_path):
    """Two workers pass the gradients on once; of a parameter server's, those of the other host's worker come and go."""
    with cluster_of(2, tmp_path / "hosts") as hosts:
        env = environment(RAY_ADDRESS=f"{hosts[0].address}:6379")
        start_ray(hosts[0], env=env)
        start_ray(hosts[1], head=hosts[0], env=env)
        command = [
            "-m",
            "raytrain.bench",
            "comm",
            *RECIPE,
            "--strategies",
            "fp16,async",
            "--rounds",
            "1",
            "--steps",
            "2",
        ]
        done = hosts[0].run("python", *command, "--json", tmp_path / "figures.json", env=env, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers of 1 CPU on a Ray cluster of 2 node(s)" in done.stdout
    rows = {row["name"]: row["median"] for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    size = rows["ddp unshaped: arithmetic"]  # 2 * 1 / 2 of the gradients, MB
    assert size == pytest.approx(44.7, rel=0.02)
    assert rows["ddp unshaped: wire"] == pytest.approx(size, rel=0.1)
    assert rows["fp16 unshaped: wire"] == pytest.approx(size / 2, rel=0.1)
    # one host sends gradients, the other weights, twice in 9 steps with momenta; Ray adds its own
    assert 1.1 * size < rows["async unshaped: wire"] < 1.6 * size


def test_a_benchmark_that_is_ended_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "raytrain.bench", "comm", *RECIPE, "--hosts", "2", "--strategies", "plain"]
    env, before = {**os.environ, "TMPDIR": str(tmp_path)}, networks()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("round 1/5: computation")
        assert list(tmp_path.glob("raytrain-bench-*"))
        assert networks() - before
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("raytrain-*")) == []  # torch leaves an empty cache of its own
    assert networks() <= before


def networks():
    return {path.name for folder in ("/run/netns", "/sys/class/net") for path in Path(folder).glob("rt*")}
