"""Workers of `raytrain.bench.comm` on hosts in network namespaces of this machine, with shaped links."""

import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from raytrain.bench.comm_ranks import Ranks, patience
from raytrain.bench.hosts import Host, cluster_of, environment, why_not
from raytrain.distributed import available_cores
from raytrain.errors import ResourceError, WorkerError

PORT = 29500
Deal = Literal["node", "round"]


class Layout(NamedTuple):
    """Who is where."""

    hosts: int
    workers_per_host: int
    deal: Deal
    """`node`: the ranks of a host follow each other. `round`: rank r is on host r modulo their number."""

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.hosts * self.workers_per_host

    @property
    def threads(self) -> int:
        """Of each worker: they share the processors of one machine."""
        return max(1, available_cores() // self.world_size)

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's host, and its number there."""
        if self.deal == "node":
            return divmod(rank, self.workers_per_host)
        return rank % self.hosts, rank // self.hosts


class HostRanks(Ranks):
    """The workers, one process each, from their start to the end of their hosts.

    Args:
        hosts: that are on.
        layout: of the workers on them.
        folder: for what they print.
        recipe: what they compute, see `bench_comm`.

    Raises:
        WorkerError: by every method: a worker died, or does not answer. It says which and what it printed last.
    """

    def __init__(self, hosts: Sequence[Host], layout: Layout, folder: Path, recipe: Sequence[str] = ()) -> None:
        self._hosts, self._folder, self.world_size = hosts, folder, layout.world_size
        self._host_of = [hosts[layout.place(rank)[0]] for rank in range(layout.world_size)]
        self._processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(self._host_of):
            env = environment(
                RANK=str(rank),
                LOCAL_RANK=str(layout.place(rank)[1]),
                WORLD_SIZE=str(layout.world_size),
                MASTER_ADDR=hosts[0].address,
                MASTER_PORT=str(PORT),
                OMP_NUM_THREADS=str(layout.threads),
            )
            command = (sys.executable, "-m", "raytrain.bench.comm_rank", *recipe)
            self._processes.append(host.converse(*command, env=env, log=self._log(rank)))

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        line = json.dumps([method, *arguments])
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
            except BrokenPipeError:
                with suppress(BrokenPipeError):
                    process.stdin.close()  # what is still in its buffer is lost, too
                raise self._lost(rank, 0) from None
        return [json.loads(answer) for answer in self._answers(patience(method))]

    def shape(self, rate: str | None) -> None:
        for host in self._hosts:
            host.shape(rate)

    def sent_on_wire(self) -> float | None:
        if len(self._hosts) == 1:
            return None
        return sum(host.sent_bytes() for host in self._hosts) / len(self._hosts)

    def _answers(self, seconds: float) -> list[str]:
        """A line of each rank."""
        lines: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
            while len(lines) < len(self._processes):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self._lost(min(set(range(len(self._processes))) - set(lines)), seconds)
                for key, _ in ready:
                    rank, stream = key.data
                    lines[rank] = stream.readline()
                    if not lines[rank]:
                        raise self._lost(rank, seconds)
                    selector.unregister(stream)
        return [lines[rank] for rank in range(len(self._processes))]

    def _lost(self, rank: int, seconds: float) -> WorkerError:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        status = process.returncode
        what = f"has not answered in {seconds:g} s" if status is None else f"ended with status {status}"
        last = self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return WorkerError(
            "\n".join([f"rank {rank} on host {self._host_of[rank].name} {what}; it printed last:", *last])
        )

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


@contextmanager
def on_hosts(layout: Layout, recipe: Sequence[str]) -> Iterator[HostRanks]:
    """Hosts with workers, gone afterwards.

    Raises:
        ResourceError: this machine cannot have such hosts.
    """
    if (reason := why_not()) is not None:
        raise ResourceError(f"this benchmark cannot run here: {reason}")
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as temp, cluster_of(layout.hosts, Path(temp)) as hosts:
        yield HostRanks(hosts, layout, Path(temp), recipe)
