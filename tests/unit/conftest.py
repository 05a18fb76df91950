"""Disks that fill, and an object store: real ones, for a test."""

import os
import shutil
import subprocess

import boto3
import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture
def new_disk(tmp_path):
    """Mounts a file system of so many KiB."""
    mount, mounted = shutil.which("mount"), []
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a tmpfs needs root")

    def new(kib):
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = [mount, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", disk]
        made = subprocess.run(command, capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"mounting a tmpfs is not allowed here: {made.stderr.decode().strip()}")
        mounted.append(disk)
        return disk

    yield new
    for disk in mounted:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="module")
def s3():
    """boto3's client of a server of this module's own, which the environment points to."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    client = boto3.client("s3")
    yield client
    client.close()
    os.environ.clear()
    os.environ.update(before)
    server.stop()
