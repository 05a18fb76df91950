"""Which way of communicating is the fastest here, among those that leave the mathematics alone."""

import torch

from raytrain.comm.compression import Compression, Half, Uncompressed
from raytrain.comm.predict import predict_step
from raytrain.comm.probe import measure_computation, measure_delay, measure_sums
from raytrain.comm.topology import Topology, nodes_of
from raytrain.config import Config
from raytrain.distributed import Runtime

WORTHWHILE = 0.97
"""Of the predicted time of a plain step; what does not come below it is not worth the difference."""


def choose_strategy(
    config: Config, num_classes: int, runtime: Runtime, dtype: torch.dtype | None
) -> tuple[Config, str]:
    """Measures, predicts and chooses, the same on all ranks, which must all call. It takes some seconds.

    Args:
        config: the run; of its `comm` the topology and the compression are chosen.
        num_classes: of the training set.
        runtime: this process.
        dtype: of autocast, or None.

    Returns:
        The config to train with, and a line that says what was chosen and why.
    """
    if runtime.world_size == 1:
        return config, "comm.strategy auto: one worker, nothing to send"
    nodes = nodes_of(runtime.gather(runtime.node), config.comm.workers_per_node)
    topologies = {"flat": [[rank] for rank in range(runtime.world_size)]}
    if 1 < len(nodes) < runtime.world_size:
        topologies["hierarchical"] = nodes
    compressions: dict[str, Compression] = {"none": Uncompressed()}
    if config.comm.auto_bf16:
        compressions["bf16"] = Half(torch.bfloat16)
    computation, delay = measure_computation(config, num_classes, runtime, dtype), measure_delay(runtime)
    predicted: dict[tuple[str, str], float] = {}
    for name, ranks in topologies.items():
        topology = Topology(ranks, runtime.rank)
        for kind, compression in compressions.items():
            sums = measure_sums(topology, compression, runtime, len(ranks), delay)
            predicted[name, kind] = predict_step(computation, sums)
        topology.close()
    plain = predicted["flat", "none"]
    best = min(predicted, key=predicted.__getitem__)
    if predicted[best] > WORTHWHILE * plain:
        best = ("flat", "none")
    times = ", ".join(f"{name} {kind} {1000 * seconds:.0f} ms" for (name, kind), seconds in predicted.items())
    reason = (
        f"comm.strategy auto: topology {best[0]}, compression {best[1]}; predicted steps: {times}; computation alone "
        f"{1000 * computation.seconds:.0f} ms"
    )
    comm = config.comm.model_copy(update={"topology": best[0], "compression": best[1]})
    return config.model_copy(update={"comm": comm}), reason
