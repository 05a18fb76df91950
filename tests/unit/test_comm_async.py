"""Asynchronous SGD: alone it is plain SGD, and a gradient that comes late is made up for."""

import numpy as np
import pytest
import torch

from raytrain import checkpoint
from raytrain.comm import make_push_optimizer
from raytrain.comm.server import ParameterServer
from raytrain.config import Optim
from raytrain.distributed import Runtime
from raytrain.errors import ConfigError, StoppedError
from raytrain.model import build_model
from tests.places import at
from tests.unit.test_loop import assert_same_bits, make_config, run, saved_steps, series, stop_after

SHAPES = [(2, 3), (4,)]
SGD = {"base_lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def newest(folder):
    return folder / "checkpoints" / f"step_{saved_steps(folder)[-1]:08d}"


def test_one_worker_without_delay_is_plain_sgd(tmp_path):
    run(make_config(), tmp_path / "plain")
    _, rows = run(make_config(comm__sync="async", comm__period=2), tmp_path / "async")
    ours, theirs = (at(newest(tmp_path / kind)) for kind in ("async", "plain"))
    weights, others = checkpoint.load_weights(ours), checkpoint.load_weights(theirs)
    assert [key for key in weights if not weights[key].equal(others[key])] == []
    momenta, other_momenta = (checkpoint.load_training(path)["optimizer"]["state"] for path in (ours, theirs))
    assert all(momenta[n]["momentum_buffer"].equal(other_momenta[n]["momentum_buffer"]) for n in momenta)
    assert {value for _, value in series(rows, "perf/comm_staleness")} == {0.0}
    assert {step for step, _ in series(rows, "train/loss")} == {2, 3, 4, 6, 8, 9, 10, 12}  # and each epoch's end


def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path):
    config = make_config(comm__sync="async", comm__period=2)
    run(config, tmp_path / "straight")
    with pytest.raises(StoppedError):
        run(config, tmp_path / "stopped", runtime=stop_after(4))
    assert saved_steps(tmp_path / "stopped") == [4]
    run(config, tmp_path / "stopped")
    assert_same_bits(newest(tmp_path / "stopped"), newest(tmp_path / "straight"))


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_late_gradients_are_compensated_by_how_far_the_weights_have_moved(strength):
    """DC-ASGD: g + lambda g g (w - w_old), then Nesterov's momentum; vectors have no weight decay.

    What comes is a third of g, or two. Nobody has pulled before the first push.
    """
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=10).astype(np.float32), rng.normal(size=(5, 10)).astype(np.float32)
    server = ParameterServer(Optim(name="sgd", **SGD), strength)
    server.begin(SHAPES, torch.from_numpy(start), torch.zeros(10))
    weights, momentum, decay = start.astype(np.float64), np.zeros(10), np.array([0.01] * 6 + [0.0] * 4)
    given = {0: (0, weights), 1: (0, weights)}
    for updates, (rank, gradient) in enumerate(zip([0, 0, 1, 0, 1], gradients, strict=True)):
        lr, share = 0.1 / (updates + 1), (1 + rank) / 3
        got, staleness = server.push(rank, share * torch.from_numpy(gradient), share, lr)
        assert staleness == updates - given[rank][0]
        applied = share * (gradient + strength * gradient**2 * (weights - given[rank][1]) + decay * weights)
        momentum = 0.9 * momentum + applied
        weights = weights - lr * (applied + 0.9 * momentum)
        given[rank] = updates + 1, weights
        np.testing.assert_allclose(got.numpy(), weights, rtol=1e-4, atol=1e-6)
    got, momenta = server.pull(1)
    np.testing.assert_allclose(got.numpy(), weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(momenta.numpy(), momentum, rtol=1e-4, atol=1e-6)


def test_several_processes_without_a_server_are_refused():
    config = make_config(comm__sync="async")
    model = build_model(config.model, config.data, 3, 0)
    with pytest.raises(ConfigError, match="parameter server, which only Ray starts"):
        make_push_optimizer(config, model, Runtime(world_size=2))
