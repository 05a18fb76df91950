"""The hosts that other tests of this folder rely on."""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from raytrain.bench.hosts import ROOT, bits_per_second, cluster_of, environment, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listens", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(peer.recv(100))
    while peer.recv(100):  # until the end of the connection
        pass
"""
CLIENT = """
import socket, sys, time
for _ in range(50):
    try:
        peer = socket.create_connection((sys.argv[1], 5000), timeout=2)
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
peer.sendall(b"ping")
print(peer.recv(100).decode(), flush=True)
peer.settimeout(float(sys.argv[2]))
try:
    print("closed" if not peer.recv(100) else "data")
except OSError as error:
    print(type(error).__name__)
"""
SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens", flush=True)
    for number in range(2):
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass
        peer.close()
"""
SOURCE = """
import socket, sys, time
start = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
print(time.perf_counter() - start)
"""
PYTHON = sys.executable


@pytest.fixture
def pair(tmp_path):
    with cluster_of(2, tmp_path / "hosts") as hosts:
        yield hosts


def _wait_for(path, text):
    for _ in range(100):
        if text in path.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"{path.name}: {path.read_text()}")


def _connect(pair, tmp_path, wait_seconds):
    """A connection to the second host: the client's process and what it prints."""
    client, server = pair
    server.start(PYTHON, "-c", SERVER, server.address)
    out = tmp_path / "client"
    process = client.start(PYTHON, "-c", CLIENT, server.address, wait_seconds, out=out)
    _wait_for(out, "ping")
    return process, out


def test_a_host_is_a_machine_of_its_own(pair, tmp_path):
    first, second = pair
    names = [host.run("hostname").stdout.strip() for host in pair]
    assert names == [first.name, second.name]
    first.run("touch", "/dev/shm/mine", "/tmp/ray/mine")
    assert second.run("ls", "/dev/shm", "/tmp/ray").stdout.split() == ["/dev/shm:", "/tmp/ray:"]
    assert first.run("sh", "-c", "echo $RAY_X; exit 3", env=environment(RAY_X="1")).stdout == "1\n"
    process, out = _connect(pair, tmp_path, 1)
    assert process.wait(10) == 0
    assert out.read_text().split() == ["ping", "TimeoutError"]


def test_a_power_off_tells_its_peers_nothing(pair, tmp_path):
    process, out = _connect(pair, tmp_path, 3)
    server = pair[1]
    server.run("touch", "/dev/shm/mine", "/tmp/ray/mine")
    server.power_off()
    assert not server.is_on
    server.power_on()  # within the client's wait: nothing of the old kernel may speak
    assert process.wait(10) == 0
    assert out.read_text().split() == ["ping", "TimeoutError"]
    assert server.run("ls", "/dev/shm", "/tmp/ray").stdout.split() == ["/dev/shm:", "/tmp/ray:"]
    process, out = _connect(pair, tmp_path / "..", 0.1)  # at the same address
    assert process.wait(10) == 0


def test_a_crash_tells_its_peers(pair, tmp_path):
    process, out = _connect(pair, tmp_path, 5)
    pair[1].crash()
    assert process.wait(10) == 0
    assert out.read_text().split() in (["ping", "closed"], ["ping", "ConnectionResetError"])


def test_a_cut_link_is_mended(pair, tmp_path):
    client, server = pair
    server.cut()
    server.start(PYTHON, "-c", SERVER, server.address)
    late = client.run(PYTHON, "-c", CLIENT, server.address, "1")
    assert "timed out" in late.stderr
    server.mend()
    assert client.run(PYTHON, "-c", CLIENT, server.address, "0.1").stdout.split() == ["ping", "TimeoutError"]


def test_a_shaped_link_takes_its_time_and_its_bytes_are_counted(pair, tmp_path):
    source, sink = pair
    sink.start(PYTHON, "-c", SINK, sink.address, out=tmp_path / "sink")
    _wait_for(tmp_path / "sink", "listens")
    size = 8_000_000
    for rate, least in (("100mbit", 0.6), (None, 0.0)):
        source.shape("10mbit")  # is replaced
        source.shape(rate)
        before = source.sent_bytes()
        done = source.run(PYTHON, "-c", SOURCE, sink.address, size)
        assert size <= source.sent_bytes() - before < 1.06 * size, done.stderr
        seconds = float(done.stdout)
        assert seconds > least  # 0.64 s less what goes out at once
        assert rate or seconds < 0.6
    source.shape(None)  # which it is already
    assert bits_per_second("2.5gbit") == 2.5e9
    with pytest.raises(ValueError, match="'1 GB' is no rate"):
        source.shape("1 GB")


def test_a_conversation(pair, tmp_path):
    code = "import sys; print(sys.stdin.readline().upper(), end='', flush=True); sys.exit('no more')"
    process = pair[0].converse(PYTHON, "-c", code, log=tmp_path / "log")
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "HELLO\n"
    assert process.wait(10) == 1
    assert (tmp_path / "log").read_text() == "no more\n"


def test_signals_and_the_end_of_a_command(pair, tmp_path):
    host, out = pair[0], tmp_path / "out"
    process = host.start(
        "bash", "-c", "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep .1; done", out=out
    )
    _wait_for(out, "ready")
    host.signal(process, signal.SIGTERM)
    assert process.wait(10) == 7
    assert "caught" in out.read_text()
    process = host.start("sh", "-c", "echo sleeps; exec sleep 1000", out=out)
    _wait_for(out, "sleeps")
    process.kill()  # of the nsenter
    process.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        host.run("sleep", "1000", timeout=0.2)
    deadline = time.monotonic() + 5
    while host.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not host.pids()


def test_nothing_is_left(tmp_path):
    folder = tmp_path / "hosts"
    with pytest.raises(KeyboardInterrupt), cluster_of(2, folder) as hosts:  # noqa: PT012
        names = [host.name for host in hosts]
        hosts[0].start("sh", "-c", "setsid sleep 1000 & sleep 1000")
        hosts[1].power_off()
        time.sleep(0.2)
        pids = hosts[0].pids()
        assert len(pids) == 3
        raise KeyboardInterrupt
    _expect_nothing(names, pids)
    assert list(folder.iterdir()) == []


def test_a_killed_owner_leaves_no_process_and_its_number_is_free(tmp_path):
    code = """
import sys, time; from raytrain.bench.hosts import cluster_of
with cluster_of(1, sys.argv[1]) as (host,):
    host.start("sleep", "1000")
    print(host.name, host._init, flush=True)
    time.sleep(1000)
"""
    owner = subprocess.Popen([PYTHON, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    name, init = owner.stdout.readline().split()
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(init)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(init))
    with cluster_of(1, tmp_path / "next") as (host,):
        assert host.name == name
    _expect_nothing([name], [])


def _expect_nothing(names, pids):
    assert not any(psutil.pid_exists(pid) for pid in pids)
    bridge = re.sub(r"h\d+$", "", names[0]).replace("rt", "rtbr")
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(f"{name}@" in links or name in spaces.split() for name in names)
    assert f"{bridge}:" not in links
