"""What a run does about the nodes of its cluster: one that does not share its directory, one that is drained."""

import json
import sys
import time

import pytest

from raytrain.bench.hosts import cluster_of, environment, why_not
from tests.cluster.nodes import start_ray

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

WORDS = ("model.name=shufflenet_v2_x0_5", "tracking.enabled=false", "run.name=run", "train.log_every=1")
DRAIN = """
import sys, time, ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
ray.init("auto", log_to_driver=False, logging_level="ERROR")
(node,) = (node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == sys.argv[1])
reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
deadline = int((time.time() + 60) * 1000)
print(GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(node, reason, "spot", deadline))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts with a worker's room each."""
    with cluster_of(2, tmp_path_factory.mktemp("hosts")) as hosts:
        start_ray(hosts[0])
        start_ray(hosts[1], hosts[0])
        yield hosts


def fit(hosts, out, *words):
    env = environment(RAY_ADDRESS=f"{hosts[0].address}:6379")
    return hosts[0].start(sys.executable, "-u", "-m", "raytrain.fit", *WORDS, *words, env=env, out=out)


def wait_for(process, out, text, seconds=120):
    end = time.monotonic() + seconds
    while text not in out.read_text():
        assert process.poll() is None, out.read_text()
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.1)


def test_a_directory_that_is_not_shared_is_refused_by_the_node_that_lacks_it(hosts, tmp_path):
    """B51: each host has a /dev/shm of its own."""
    process = fit(hosts, tmp_path / "out", "scaling.num_workers=2", "run.storage_path=/dev/shm/runs")
    assert process.wait(120) == 2
    told = (tmp_path / "out").read_text()
    assert "raytrain: run.storage_path is not the same on all nodes" in told
    assert f"{hosts[1].name} does not see what the driver wrote to /dev/shm/runs/run" in told
    assert "Traceback" not in told
    assert "step 1/" not in told


def test_a_node_that_is_drained_is_left_after_a_checkpoint(hosts, tmp_path):
    out = tmp_path / "out"
    words = ("scaling.num_workers={min: 1, max: 2}", f"run.storage_path={tmp_path}", "checkpoint.every_epochs=null")
    process = fit(hosts, out, *words, "train.max_steps=300", "scaling.max_failures=0")
    wait_for(process, out, "step 5/300")
    drained = hosts[0].run(sys.executable, "-c", DRAIN, hosts[1].address)
    assert "True" in drained.stdout, drained.stdout + drained.stderr
    wait_for(process, out, "a node is about to leave; going on after a checkpoint")
    wait_for(process, out, "resuming after step ")
    assert process.wait(300) == 0, out.read_text()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "resize", "start", "end"]
    assert [event["workers"] for event in events if event["kind"] == "start"] == [2, 1]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 301))
