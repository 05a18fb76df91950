"""`python -m raytrain.prepare` over a Ray cluster."""

import subprocess
import sys
from contextlib import contextmanager

from tests.datasets import photo_samples, write_folder
from tests.ray.conftest import environment

CLUSTER = """
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print("at", ray.get_runtime_context().gcs_address, flush=True)
input()
"""


@contextmanager
def cluster(env):
    """The address of a Ray of this test's own."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        address = next(line.split()[1] for line in process.stdout if line.startswith("at "))
        yield address
        process.communicate("\n", timeout=60)


def prepare(*words, **changes):
    return subprocess.run(
        [sys.executable, "-m", "raytrain.prepare", *map(str, words)],
        env=environment(RAY_AUTH_MODE="disabled", **changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def files(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_cluster_makes_the_shards_that_one_machine_makes(tmp_path):
    for split in ("train", "val"):
        write_folder(tmp_path / "photos" / split, photo_samples(6))
    words = (tmp_path / "photos", "--max-side", "40", "--shard-gib", "0.000002")
    here = prepare(words[0], tmp_path / "here", *words[1:])
    assert here.returncode == 0, here.stderr
    assert len(list((tmp_path / "here/train").glob("*.arrow"))) > 3
    with cluster(environment(RAY_AUTH_MODE="disabled")) as address:
        there = prepare(words[0], tmp_path / "there", *words[1:], RAY_ADDRESS=address)
        assert there.returncode == 0, there.stderr
        assert "Traceback" not in there.stderr
        broken = tmp_path / "photos/train/cat/000.jpg"
        broken.write_bytes(b"no image")
        refused = prepare(words[0], tmp_path / "other", *words[1:], RAY_ADDRESS=address)
        assert refused.returncode == 2
        assert str(broken.relative_to(tmp_path / "photos/train")) in refused.stderr
    assert files(tmp_path / "there") == files(tmp_path / "here")
