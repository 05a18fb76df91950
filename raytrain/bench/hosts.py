"""Hosts on one machine: network, process and mount namespaces on a bridge, which can lose their power or their link.

It needs root on Linux, iproute2 and util-linux. A host has its own address, hostname, processes, /dev/shm and
/tmp/ray; it shares the rest of the file system, and the machine's processors and memory.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
"""What `raytrain` lies in, of a checkout or an installation."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
UNSHARE = ("unshare", "--fork", "--kill-child", "--mount-proc", "--pid", "--mount", "--uts", "--ipc")
# A host's first process. It ends, and the host with it, when its standard input does: with the process that made it.
# By the default route Ray finds out its address. Names are looked up in a file of the cluster's, as gloo looks up the
# host's own when a group is made, and a name server out of reach would cost 6 s each time.
INIT = """set -e; hostname "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm; mkdir -p /tmp/ray; mount --bind "$3" /tmp/ray
mount --bind "$4" /etc/hosts; mount --bind /dev/null /etc/resolv.conf
ip addr add "$2/24" dev eth0; ip link set lo up; ip link set eth0 up; ip route add default dev eth0
echo up; read -r"""
BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST_BYTES = 65536
BURST_SECONDS = 0.001
"""What a shaped link sends at once after a pause; with 64 KiB alone it stays 3 % below 2 Gbit/s."""


class Host:
    """One of the hosts that `cluster_of` gives. `is_on` says whether it has power; its link may be cut."""

    def __init__(self, name: str, address: str, mac: str, bridge: str, folder: Path) -> None:
        self.name, self.address, self.is_on, self.folder = name, address, False, folder
        self._mac, self._bridge, self._boots = mac, bridge, 0

    def power_on(self) -> None:
        """Starts it with nothing of what it had in memory, /dev/shm and /tmp/ray."""
        self._boots += 1
        scratch = self.folder / f"ray-{self._boots}"
        scratch.mkdir(parents=True)
        _ip(f"netns add {self.name}")
        _ip(f"link add {self.name} type veth peer name eth0 address {self._mac} netns {self.name}")
        _ip(f"link set {self.name} master {self._bridge} up")
        # not `ip netns exec`, which hides the cgroups
        command = ["nsenter", f"--net=/run/netns/{self.name}", *UNSHARE]
        command += [
            "bash",
            "-c",
            INIT,
            "init",
            self.name,
            self.address,
            str(scratch),
            str(self.folder.parent / "names"),
        ]
        self._unshare = subprocess.Popen(  # noqa: S603 - our own words
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._commands: list[subprocess.Popen[Any]] = []
        self._init: int | None = None
        self.is_on = True
        assert self._unshare.stdout is not None
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
            with suppress(BrokenPipeError), process:  # what it was not there to read
                pass

    def cut(self) -> None:
        """Takes its link down: packets to and from it vanish."""
        _ip(f"link set {self.name} down")

    def mend(self) -> None:
        """Puts its link up again."""
        _ip(f"link set {self.name} up")

    def shape(self, rate: str | None) -> None:
        """Limits what its link sends to a rate such as "500mbit", headers included, or to none.

        Raises:
            ValueError: it is no rate.
        """
        if rate is None:
            _run(f"tc -n {self.name} qdisc del dev eth0 root", check=False)
            return
        burst = max(BURST_BYTES, round(bits_per_second(rate) / 8 * BURST_SECONDS))
        _run(f"tc -n {self.name} qdisc replace dev eth0 root tbf rate {rate} burst {burst} latency 50ms")

    def sent_bytes(self) -> int:
        """What its link has sent since the power went on. Of a large packet that the kernel cuts, the header once."""
        (link,) = json.loads(_run(f"ip -n {self.name} -s -j link show eth0"))
        return link["stats64"]["tx"]["bytes"]

    def start(
        self, *command: object, env: dict[str, str] | None = None, out: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Runs a command in a session of its own, its outputs appended to a file; it dies with the host.

        The Popen is that of nsenter, which waits for the command. Its `kill` ends both; for other signals see `signal`.
        """
        with Path(out or os.devnull).open("ab") as file:
            return self._start(command, env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def converse(self, *command: object, env: dict[str, str] | None = None, log: Path) -> subprocess.Popen[str]:
        """As `start`, with pipes to write lines to and to read them from; its standard error goes to a file."""
        with log.open("ab") as file:
            return self._start(command, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True)

    def run(
        self, *command: object, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, whatever its exit status, its outputs as text."""
        return subprocess.run(  # noqa: S603 - our own words
            self._inside(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **_options(env),
        )

    def _start(self, command: tuple[object, ...], env: dict[str, str] | None, **pipes: Any) -> subprocess.Popen[Any]:
        self._commands.append(subprocess.Popen(self._inside(command), **pipes, **_options(env)))  # noqa: S603 - our own words
        return self._commands[-1]

    def _inside(self, command: tuple[object, ...]) -> list[str]:
        enter = ["nsenter", "-t", self._init, "--net", "--pid", "--mount", "--uts", "--ipc", "--"]
        enter += ["setpriv", "--pdeathsig", "KILL", "--"]  # else the command would outlive a killed nsenter
        return [*map(str, (*enter, *command))]

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
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


def bits_per_second(rate: str) -> float:
    """Of a rate such as "500mbit".

    Raises:
        ValueError: it is none.
    """
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)):
        raise ValueError(f"{rate!r} is no rate such as 500mbit or 1gbit")
    return float(match[1]) * BITS[match[2]]


@contextmanager
def cluster_of(count: int, folder: Path, subnet: str | None = None) -> Iterator[list[Host]]:
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
            stack.callback(shutil.rmtree, host.folder, ignore_errors=True)
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
    words = [*UNSHARE, "--net", "sh", "-c", trial]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else None


def _claim(stack: ExitStack) -> int:
    """A number that no other process of this machine has until the stack is closed."""
    for number in range(1, 250):
        # the same file for all owners, whatever their TMPDIR
        lock = os.open(f"/tmp/raytrain-hosts-{number}.lock", os.O_CREAT | os.O_RDWR)  # noqa: S108
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
    _run(f"ip {arguments}", check=check)


def _run(line: str, *, check: bool = True) -> str:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if check and done.returncode:
        raise RuntimeError(f"{line}: {done.stderr.strip()}")
    return done.stdout


def _options(env: dict[str, str] | None) -> dict[str, Any]:
    return {"cwd": ROOT, "env": environment() if env is None else env, "start_new_session": True}
