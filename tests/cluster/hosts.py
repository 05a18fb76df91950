"""Hosts on one machine: network, process and mount namespaces on a bridge, which can lose their power or their link.

It needs root on Linux, iproute2, util-linux and psutil. A host has its own address, hostname, processes, /dev/shm and
/tmp/ray; it shares the rest of the file system, and the machine's processors and memory.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
UNSHARE = ("unshare", "--fork", "--kill-child", "--mount-proc", "--pid", "--mount", "--uts", "--ipc")
# A host's first process. It ends, and the host with it, when its standard input does: with the process that made it.
# By the default route Ray finds out its address. Names are looked up in a file of the cluster's, as gloo looks up the
# host's own when a group is made, and a name server out of reach would cost 6 s each time.
INIT = """set -e; hostname "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm; mkdir -p /tmp/ray; mount --bind "$3" /tmp/ray
mount --bind "$4" /etc/hosts; mount --bind /dev/null /etc/resolv.conf
ip addr add "$2/24" dev eth0; ip link set lo up; ip link set eth0 up; ip route add default dev eth0
echo up; read -r"""


class Host:
    """One of the hosts that `cluster_of` gives. `is_on` says whether it has power; its link may be cut."""

    def __init__(self, name: str, address: str, mac: str, bridge: str, folder: Path) -> None:
        self.name, self.address, self.is_on = name, address, False
        self._mac, self._bridge, self._folder, self._boots = mac, bridge, folder, 0

    def power_on(self) -> None:
        """Starts it with nothing of what it had in memory, /dev/shm and /tmp/ray."""
        self._boots += 1
        scratch = self._folder / f"ray-{self._boots}"
        scratch.mkdir(parents=True)
        _ip(f"netns add {self.name}")
        _ip(f"link add {self.name} type veth peer name eth0 address {self._mac} netns {self.name}")
        _ip(f"link set {self.name} master {self._bridge} up")
        # not `ip netns exec`, which hides the cgroups
        command = ["nsenter", f"--net=/run/netns/{self.name}", *UNSHARE]
        command += ["bash", "-c", INIT, "init", self.name, self.address, scratch, self._folder.parent / "names"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._unshare = subprocess.Popen(command, **pipes, start_new_session=True)
        self._commands, self._init, self.is_on = [], None, True
        if (line := self._unshare.stdout.readline()) != b"up\n":
            raise RuntimeError(f"host {self.name}: {line!r}")
        self._init = psutil.Process(self._unshare.pid).children()[0].pid
        self._space = Path(f"/proc/{self._init}/ns/pid").readlink()

    def power_off(self) -> None:
        """Ends it without a packet to its peers: its link goes first, its processes after that."""
        if self.is_on:
            self.cut()
            self.crash()
        _remove(self.name)  # the kernel's sockets too, which would send a FIN once the link is up again

    def crash(self) -> None:
        """Ends all of its processes at once, which its kernel tells their peers; only `power_off` may follow."""
        self.is_on = False
        if self._init is not None:  # else it ends by itself when its input does
            with suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        for process in (self._unshare, *self._commands):  # unshare ends when the last of the host's processes has
            with process:
                pass

    def cut(self) -> None:
        """Takes its link down: packets to and from it vanish."""
        _ip(f"link set {self.name} down")

    def mend(self) -> None:
        """Puts its link up again."""
        _ip(f"link set {self.name} up")

    def start(self, *command, env: dict[str, str] | None = None, out: Path | None = None) -> subprocess.Popen:
        """Runs a command in a session of its own, its outputs appended to a file; it dies with the host.

        The Popen is that of nsenter, which waits for the command. Its `kill` ends both; for other signals see `signal`.
        """
        with Path(out or os.devnull).open("ab") as file:
            self._commands.append(subprocess.Popen(**self._inside(command, env), stdout=file, stderr=file))
        return self._commands[-1]

    def run(self, *command, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess:
        """Runs a command to its end, whatever its exit status, its outputs as text."""
        options = self._inside(command, env)
        return subprocess.run(**options, capture_output=True, text=True, timeout=timeout, check=False)

    def _inside(self, command, env):
        enter = ["nsenter", "-t", self._init, "--net", "--pid", "--mount", "--uts", "--ipc", "--"]
        enter += ["setpriv", "--pdeathsig", "KILL", "--"]  # else the command would outlive a killed nsenter
        options = {"cwd": ROOT, "env": environment() if env is None else env, "start_new_session": True}
        return options | {"args": [*map(str, (*enter, *command))], "stdin": subprocess.DEVNULL}

    def signal(self, process: subprocess.Popen, number: int) -> None:
        """Sends a signal to the command that `start` has started."""
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)

    def pids(self) -> list[int]:
        """Its processes but the init, by the machine's numbers."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError):  # it has ended meanwhile
                if pid != self._init and Path(f"/proc/{pid}/ns/pid").readlink() == self._space:
                    found.append(pid)
        return found


def environment(**more: str) -> dict[str, str]:
    """The environment of a command in a host: this one's without Ray's and MLflow's settings, with some of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return (
        env | {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": "eth0"} | more
    )


def start_ray(host: Host, head: Host | None = None, cpus: int = 1, env: dict[str, str] | None = None) -> None:
    """Starts a node of Ray in a host, of a new cluster or of that of `head`, and returns when it is up."""
    place = [f"--address={head.address}:6379"] if head else ["--head", "--port=6379", "--include-dashboard=false"]
    options = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    done = host.run("ray", "start", *place, *options, "--disable-usage-stats", env=env)
    if done.returncode:
        raise RuntimeError(f"ray start in {host.name}: {done.stdout}{done.stderr}")


@contextmanager
def cluster_of(count: int, folder: Path, subnet: str | None = None):
    """Hosts on a network of their own, switched on: a list. Nothing of them is left afterwards.

    Their /tmp/ray lie in the folder. The subnet is the first three bytes of their addresses; each cluster here has one
    of its own by default.
    """
    with ExitStack() as stack:
        number = _claim(stack)
        bridge, hosts = f"rtbr{number}", []
        for i in range(1, count + 1):
            name, address = f"rt{number}h{i}", f"{subnet or f'10.77.{number}'}.{i}"
            hosts.append(
                Host(name, address, f"02:77:00:00:{number:02x}:{i:02x}", bridge, Path(folder).resolve() / name)
            )
        for name in (bridge, *(host.name for host in hosts)):  # what a killed owner of this number has left
            _remove(name)
        stack.callback(_remove, bridge)
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        names = Path(folder) / "names"
        names.parent.mkdir(parents=True, exist_ok=True)
        stack.callback(names.unlink, missing_ok=True)
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
        for host in hosts:
            stack.callback(shutil.rmtree, host._folder, ignore_errors=True)
            stack.callback(host.power_off)
            host.power_on()
        yield hosts


def why_not() -> str | None:
    """Why this machine cannot have such hosts, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts in namespaces need root on Linux"
    if missing := [f"{tool} of {package}" for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        return f"hosts in namespaces need {', '.join(missing)}"
    trial = "mount -t tmpfs tmpfs /dev/shm && ip link add br7 type bridge && ip link add v7 type veth peer name w7"
    done = subprocess.run([*UNSHARE, "--net", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else None


def _claim(stack: ExitStack) -> int:
    """A number that no other process of this machine has until the stack is closed."""
    for number in range(1, 250):
        lock = os.open(f"/tmp/raytrain-hosts-{number}.lock", os.O_CREAT | os.O_RDWR)
        stack.callback(os.close, lock)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number
    raise RuntimeError("too many clusters of hosts on this machine")


def _remove(name: str) -> None:
    """Removes the device and the network namespace of that name, where they are."""
    _ip(f"link del {name}", check=False)
    _ip(f"netns del {name}", check=False)


def _ip(arguments: str, *, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {arguments}: {done.stderr.strip()}")
