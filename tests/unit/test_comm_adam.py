"""1-bit Adam against AdamW while it warms up, and against a simulation in NumPy once it is frozen."""

import numpy as np
import pytest
import torch
from torch import nn

from raytrain.config import Optim
from raytrain.optim import make_optimizer
from tests.unit.comm_ranks import outcomes
from tests.unit.test_comm_onebit import FLAT, NODES, Simulation, elements_of

FREEZE_STEP, STEPS, BETAS, DECAY = 4, 8, (0.9, 0.99), 0.1


def steps_of(name):
    """Weights after each of some steps of a matrix with random gradients, the first row's only once it is frozen; and
    those gradients.
    """
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 7))
    options = {"base_lr": 0.01, "betas": BETAS, "weight_decay": DECAY, "freeze_step": FREEZE_STEP}
    optimizer = make_optimizer([parameter], Optim(name=name, **options))
    weights, gradients = [parameter.detach().numpy().copy()], []
    for step in range(STEPS):
        parameter.grad = torch.randn(5, 7)
        parameter.grad[0] *= step >= FREEZE_STEP
        gradients.append(parameter.grad.numpy().copy())
        optimizer.step()
        weights.append(parameter.detach().numpy().copy())
    return weights, gradients


def test_it_is_adamw_until_it_freezes():
    ours, theirs = steps_of("onebit_adam")[0], steps_of("adamw")[0]
    for step in range(1, FREEZE_STEP + 1):
        np.testing.assert_allclose(ours[step], theirs[step], rtol=1e-5, atol=1e-7)
    assert not np.allclose(ours[-1], theirs[-1], rtol=1e-5)


def test_frozen_it_moves_by_the_momentum_over_the_variance_of_that_time():
    """And not where there is none."""
    weights, gradients = steps_of("onebit_adam")
    momentum, variance = np.zeros((5, 7)), np.zeros((5, 7))
    for step, gradient in enumerate(gradients, start=1):
        momentum = BETAS[0] * momentum + (1 - BETAS[0]) * gradient
        if step <= FREEZE_STEP:
            variance = BETAS[1] * variance + (1 - BETAS[1]) * gradient**2
        corrected = variance / (1 - BETAS[1] ** min(step, FREEZE_STEP))
        want = weights[step - 1] * (1 - 0.01 * DECAY)
        want[1:] -= 0.01 * momentum[1:] / (1 - BETAS[0] ** step) / (np.sqrt(corrected[1:]) + 1e-8)
        np.testing.assert_allclose(weights[step], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("world_size", "name", "nodes"),
    [(2, "onebit_adam", FLAT[2]), (4, "onebit_adam", FLAT[4]), (4, "onebit_adam_pairs", NODES[4])],
)
def test_ranks_sum_their_momenta_as_signs(world_size, name, nodes):
    """The frozen momentum of all is the signs' sum of the ranks' own, in units of what they move the weights by."""
    ranks = outcomes()[world_size]
    own, seen = np.array([rank["own"] for rank in ranks]), ranks[0][name]
    for other in ranks:
        assert np.array_equal(other[name]["momenta"], seen["momenta"])
    for step in range(3):  # not frozen: what is summed is gradients
        np.testing.assert_allclose(seen["gradients"][step], own[:, step].sum(0), rtol=1e-4, atol=1e-6)
    simulation, momentum, scale = Simulation(nodes, own.shape[2]), seen["momenta"][2], seen["scales"][2]
    for step in range(3, 10):
        assert np.array_equal(seen["scales"][step], scale)
        parts = np.float32(0.1) * own[:, step] + np.float32(0.9 / world_size) * momentum
        want = np.empty_like(momentum)
        for numbers in seen["layouts"][step]:
            for elements, result in simulation.reduce(parts / scale, elements_of(numbers)):
                want[elements] = result * scale[elements]
        # a part of next to nothing may be rounded to either sign
        close = np.isclose(seen["momenta"][step], want, rtol=1e-3)
        assert close.mean() > 0.99
        momentum = seen["momenta"][step]
        assert np.array_equal(seen["gradients"][step], momentum)


def test_one_rank_alone_does_not_compress():
    own, seen = np.array(outcomes()[1][0]["own"]), outcomes()[1][0]["onebit_adam"]
    momentum = seen["momenta"][2]
    for step in range(3, 10):
        momentum = 0.9 * momentum + 0.1 * own[step]
        np.testing.assert_allclose(seen["momenta"][step], momentum, rtol=1e-3, atol=1e-6)
