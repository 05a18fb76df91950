"""Workers of `raytrain.bench.comm` on a Ray cluster, and DataParallel on one of its nodes."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import ray
import ray.actor
import ray.exceptions
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raytrain.bench.comm_rank import STRATEGIES, Worker, make_config, make_digits_config
from raytrain.bench.comm_ranks import ANSWER_SECONDS, Measured, Ranks, patience
from raytrain.cluster import Allotment, allot, usable_nodes
from raytrain.distributed import Runtime, torchrun_runtime
from raytrain.errors import ResourceError, WorkerError
from raytrain.launch import connected
from raytrain.remote import RemoteServer, start_server

PLACE_SECONDS = 60


class RayRanks(Ranks):
    """The workers, one of Ray's actors each, the ranks of a node one after another.

    Args:
        actors: by rank.
        nodes: id of each one's node.
        recipe: what they compute.
        whole: an actor that sees all GPUs of its node, for `data_parallel`.
    """

    def __init__(self, actors: Sequence[Any], nodes: Sequence[str], recipe: Sequence[str], whole: Any = None) -> None:
        self._actors, self._nodes, self._recipe, self.world_size = actors, nodes, recipe, len(actors)
        self._whole, self.has_data_parallel = whole, whole is not None

    def turn(self, name: str, rate: str | None, steps: int) -> Measured:
        if name == "data_parallel" and self.has_data_parallel:
            return RayRanks([self._whole], self._nodes[:1], self._recipe).turn(name, rate, steps)
        return super().turn(name, rate, steps)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return _get([actor.ask.remote(method, *arguments) for actor in self._actors], patience(method))

    def shape(self, rate: str | None) -> None:
        """Links of a real network have the rate they have."""
        assert rate is None

    def sent_on_wire(self) -> float | None:
        first = dict(zip(self._nodes, self._actors, strict=True))
        if len(first) == 1:
            return None
        return sum(_get([actor.sent_on_wire.remote() for actor in first.values()], ANSWER_SECONDS)) / len(first)

    @contextmanager
    def server(self, name: str, seed: int | None = None) -> Iterator[Any]:
        if name not in STRATEGIES or not STRATEGIES[name].needs_ray:
            yield None
            return
        if seed is None:
            config = make_config(name, self._recipe, self.world_size)
        else:
            config = make_digits_config(name, seed, self.world_size)
        server = start_server(config)
        try:
            yield server
        finally:
            ray.kill(server)


def _get(answers: list[Any], seconds: float) -> list[Any]:
    try:
        return ray.get(answers, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise WorkerError(f"the workers have not answered in {seconds} s") from None
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a worker failed: {error}") from None


@contextmanager
def on_cluster(workers: int | None, recipe: Sequence[str]) -> Iterator[tuple[RayRanks, str]]:
    """Workers on the cluster at RAY_ADDRESS, or on a Ray of this machine, and what they are in words.

    Args:
        workers: how many; None: one a GPU, or where there are none one a node, but at least 2.
        recipe: what they compute, see `bench_comm`.

    Raises:
        ResourceError: there is no room for them.
        WorkerError: they cannot start.
    """
    with connected():
        nodes = usable_nodes(ray.nodes())
        gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
        count = workers or int(gpus) or max(2, len(nodes))
        allotment = allot(make_config("plain", recipe, count).scaling, nodes)
        with on_ray(allotment, recipe) as ranks:
            each = ", ".join(f"{amount:g} {kind}" for kind, amount in allotment.resources.items())
            yield ranks, f"{count} workers of {each} on a Ray cluster of {len(nodes)} node(s)"


@contextmanager
def on_ray(allotment: Allotment, recipe: Sequence[str]) -> Iterator[RayRanks]:
    """Workers on the cluster that this process is connected to, gone afterwards.

    Args:
        allotment: how many of them, and what each takes.
        recipe: what they compute, see `bench_comm`.

    Raises:
        ResourceError: there is no room for them.
        WorkerError: they cannot start.
    """
    group = placement_group([allotment.resources] * allotment.num_workers, strategy="PACK")
    try:
        if not group.wait(PLACE_SECONDS):
            raise ResourceError(f"the cluster had no room for {allotment.num_workers} workers in {PLACE_SECONDS} s")
        actors = []
        for number in range(allotment.num_workers):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            cpus, gpus = allotment.resources["CPU"], allotment.resources.get("GPU", 0)
            actors.append(ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place)(_Actor).remote())
        try:
            places = ray.get([actor.place.remote() for actor in actors], timeout=ANSWER_SECONDS)
            order = sorted(range(len(actors)), key=lambda number: places[number].node)
            actors, places = [actors[number] for number in order], [places[number] for number in order]
            env = {"LOCAL_RANK": "0", "WORLD_SIZE": str(len(actors))}  # each sees no GPU but its own
            env |= {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(places[0].port)}
            starts = [actor.begin.remote({**env, "RANK": str(rank)}, recipe) for rank, actor in enumerate(actors)]
            ray.get(starts, timeout=ANSWER_SECONDS)
            nodes, whole = [place.node for place in places], None
            all_gpus = [gpu for place in places for gpu in place.gpus]
            if len(set(nodes)) == 1 and len(all_gpus) > 1:
                here: Any = NodeAffinitySchedulingStrategy(nodes[0], soft=False)
                whole = ray.remote(num_cpus=0, scheduling_strategy=here)(_Actor).remote()
                ray.get(whole.begin_with_all.remote(all_gpus, recipe), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the workers cannot start: {error}") from None
        yield RayRanks(actors, nodes, recipe, whole)
    finally:
        remove_placement_group(group)


class _Place(NamedTuple):
    """Where an actor is."""

    node: str
    address: str
    port: int
    """One that is free there."""
    gpus: list[str]
    """Those of its own, as CUDA_VISIBLE_DEVICES names them."""


class _Actor:
    """A `Worker` in a process of Ray's."""

    def place(self) -> _Place:
        """Where it is."""
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        node, gpus = ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]
        return _Place(node, ray.util.get_node_ip_address(), port, gpus)

    def begin(self, env: dict[str, str], recipe: Sequence[str]) -> None:
        """Joins the process group."""
        os.environ |= env
        runtime = torchrun_runtime(use_gpu=bool(ray.get_gpu_ids()))
        self._worker = Worker(replace(runtime, node=ray.get_runtime_context().get_node_id()), recipe)

    def begin_with_all(self, gpus: Sequence[str], recipe: Sequence[str]) -> None:
        """Takes GPUs, which belong to actors that wait meanwhile."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # which CUDA reads when it is first used
        self._worker = Worker(Runtime(device=torch.device("cuda", 0)), recipe)

    def sent_on_wire(self) -> int:
        """Bytes that the interface of its node's address in Ray has sent."""
        return self._worker.sent_on_wire(ray.util.get_node_ip_address())

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the worker."""
        arguments = tuple(RemoteServer(one) if isinstance(one, ray.actor.ActorHandle) else one for one in arguments)
        return getattr(self._worker, method)(*arguments)
