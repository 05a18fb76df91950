"""Signs with error feedback, against a simulation of all ranks in NumPy; to the last bit."""

from functools import reduce

import numpy as np
import pytest

from tests.unit.comm_ranks import COUNTS, outcomes, sizes

FLAT = {2: [[0], [1]], 3: [[0], [1], [2]], 4: [[0], [1], [2], [3]]}
NODES = {3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}


class Simulation:
    """All ranks of some nodes, and the errors that they keep, by element in the order of the model's parameters."""

    def __init__(self, nodes, elements):
        self.nodes = nodes
        world_size = sum(len(node) for node in nodes)
        self.errors = np.zeros((world_size, elements), np.float32)
        self.sum_errors = np.zeros((world_size, elements), np.float32)

    def reduce(self, own, bucket):
        """What a bucket comes to. own: float32 [ranks, elements], bucket: int64 [n], its elements in their order."""
        fewest = min(len(node) for node in self.nodes)
        for part, elements in enumerate(np.array_split(bucket, fewest)):
            peers = [node[part] for node in self.nodes]
            sums = [reduce(np.add, own[node][:, elements]) for node in self.nodes]
            yield elements, self.between(peers, sums, elements)

    def between(self, peers, sums, elements):
        """The compressed sum of a part between the peers that hold it."""
        signs = []
        for rank, total in zip(peers, sums, strict=True):
            kept = total + self.errors[rank, elements]
            sent = np.copysign(mean_magnitude(kept), kept)
            self.errors[rank, elements] = kept - sent
            signs.append(sent)
        results = []
        for rank, places in zip(peers, np.array_split(np.arange(len(elements)), len(peers)), strict=True):
            total = self.sum_errors[rank, elements[places]].copy()
            for sent in signs:
                total += sent[places]
            result = np.copysign(mean_magnitude(total), total)
            self.sum_errors[rank, elements[places]] = total - result
            results.append(result)
        return np.concatenate(results)


def mean_magnitude(values):
    return np.float32(np.abs(values).astype(np.float64).mean())


def elements_of(numbers):
    """The elements of a bucket of these parameters, in its order."""
    starts = np.concatenate([[0], np.cumsum(sizes())])
    return np.concatenate([np.arange(starts[number], starts[number + 1]) for number in numbers])


def simulate(world_size, name, nodes):
    """Each step's gradient, float32 [steps, parameters], and what is left: the sum of all errors, float64."""
    ranks = outcomes()[world_size]
    own = np.array([rank["own"] for rank in ranks])
    simulation = Simulation(nodes, own.shape[2])
    gradients = np.full((len(COUNTS), own.shape[2]), np.nan, np.float32)
    for step in range(len(COUNTS)):
        for numbers in ranks[0][name]["layouts"][step]:
            for elements, result in simulation.reduce(own[:, step], elements_of(numbers)):
                gradients[step, elements] = result
    return gradients, simulation


@pytest.mark.parametrize(
    ("world_size", "name", "nodes"),
    [
        (2, "onebit", FLAT[2]),
        (3, "onebit", FLAT[3]),
        (4, "onebit", FLAT[4]),
        (2, "onebit_buckets", FLAT[2]),
        (4, "onebit_buckets", FLAT[4]),
        (3, "onebit_pairs", NODES[3]),
        (4, "onebit_pairs", NODES[4]),
        (4, "onebit_pairs_buckets", NODES[4]),
    ],
)
def test_signs_are_those_of_the_simulation_to_the_last_bit(world_size, name, nodes):
    want, simulation = simulate(world_size, name, nodes)
    own = np.array([rank["own"] for rank in outcomes()[world_size]], np.float64).sum((0, 1))
    for rank in outcomes()[world_size]:
        assert len(rank[name]["layouts"][-1]) == (3 if name.endswith("buckets") else 1)
        for step, gradient in enumerate(rank[name]["gradients"]):
            assert gradient.tobytes() == want[step].tobytes(), step
        left = sum(tensor.numpy().astype(np.float64) for tensor in rank[name]["state"].values())
        errors = (simulation.errors.astype(np.float64) + simulation.sum_errors).sum(0)
        np.testing.assert_allclose(left, errors, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(left + want.astype(np.float64).sum(0), own, rtol=1e-4, atol=1e-5)


def test_the_simulation_is_far_from_plain_sums_at_each_step():
    for world_size in (2, 3, 4):
        own = np.array([rank["own"] for rank in outcomes()[world_size]]).sum(0)
        got = np.array(outcomes()[world_size][0]["onebit"]["gradients"])
        assert (np.linalg.norm(got - own, axis=1) > 0.1 * np.linalg.norm(own, axis=1)).all()
