"""Late, local and plain SGD in one process and plain PyTorch, for test_comm_state."""

from functools import reduce

import torch
from torch.nn import functional

from raytrain.data.loader import train_batches
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule
from tests.unit.comm_ranks import CLASSES, build_tiny
from tests.unit.test_loop import Noise

IMAGES = 3 * 24 + 16
"""Of an epoch: its last step has four micro-batches."""


class Replica:
    """The small network of one rank, its momentum and batch norm's running statistics, in plain PyTorch."""

    def __init__(self, config):
        self.model = build_tiny(config.model, config.data, CLASSES, config.run.seed)
        self.norms = [m for m in self.model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        self.running = [[n.running_mean.clone(), n.running_var.clone()] for n in self.norms]
        for norm in self.norms:
            norm.momentum = 1.0
        self.parameters = list(self.model.parameters())
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.momentum = [torch.zeros_like(p) for p in self.parameters]

    def gradients(self, batches, images):
        """Of the sum of losses over `images`; with that sum, and each micro-batch's batch-norm statistics."""
        for p in self.parameters:
            p.grad.zero_()
        total, seen = 0.0, []
        for batch in batches:
            loss = functional.cross_entropy(self.model(batch.images), batch.labels, reduction="sum")
            (loss / images).backward()
            total += loss.item()
            seen.append([t.clone() for n in self.norms for t in (n.running_mean, n.running_var)])
        return [p.grad.clone() for p in self.parameters], total, seen

    def apply(self, gradients, seen, lr):
        optimizer = torch.optim.SGD(
            [
                {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 1e-4},
                {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=lr,
            momentum=0.9,
            nesterov=True,
            fused=True,
        )
        for p, gradient, momentum in zip(self.parameters, gradients, self.momentum, strict=True):
            p.grad = gradient
            optimizer.state[p]["momentum_buffer"] = momentum
        optimizer.step()
        means = [torch.stack(tensors).mean(0) for tensors in zip(*seen, strict=True)]
        for old, new in zip([t for pair in self.running for t in pair], means, strict=True):
            old.lerp_(new, 0.1)
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    def state(self):
        """Weights, momenta and running statistics: tensors that can be written to."""
        return [p.data for p in self.parameters] + self.momentum + [t for pair in self.running for t in pair]

    def weights(self):
        for norm, (mean, var) in zip(self.norms, self.running, strict=True):
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            norm.num_batches_tracked.fill_(8)  # steps, not micro-batches
        return self.model.body.state_dict()


def steps_of(config, world_size):
    """(step, images, learning rate, each rank's micro-batches) of a run."""
    plan, source = make_plan(config.train, IMAGES), Noise(IMAGES)
    schedule = make_schedule(config, plan)
    ranks = [
        train_batches(source, config.data, plan, config.run.seed, rank, world_size, 0, 1, torch.device("cpu"))
        for rank in range(world_size)
    ]
    for step, owns in enumerate(zip(*ranks, strict=True)):
        yield step, plan.images_seen(step + 1) - plan.images_seen(step), schedule(step), [own.batches for own in owns]


def sum_of(gradients):
    """Added in turn of rank; unlike torch.stack, addition keeps channels_last, which the fused optimizer relies on."""
    return [reduce(torch.add, tensors) for tensors in zip(*gradients, strict=True)]


def simulate_sums(config, world_size, delay):
    """One replica, whose gradients are applied `delay` steps late. Returns weights, and each step's loss and images."""
    replica, waiting, losses = Replica(config), [], []
    for _, images, lr, owns in steps_of(config, world_size):
        parts, totals, seen = zip(*(replica.gradients(own, images) for own in owns), strict=True)
        waiting.append((sum_of(parts), [statistics for of_rank in seen for statistics in of_rank], lr))
        losses.append((sum(totals), images))
        if len(waiting) > delay:
            replica.apply(*waiting.pop(0))
    for late in waiting:
        replica.apply(*late)
    return replica.weights(), losses


def simulate_local(config, world_size):
    """A replica each rank. Returns the weights after the last average, and each step's loss and images."""
    replicas, losses, own_images = [Replica(config) for _ in range(world_size)], [], [0] * world_size
    for step, images, lr, owns in steps_of(config, world_size):
        together = step < config.comm.warmup_steps
        seen = [sum(batch.count for batch in own) for own in owns]
        results = [
            replica.gradients(own, images if together else count)
            for replica, own, count in zip(replicas, owns, seen, strict=True)
        ]
        losses.append((sum(loss for _, loss, _ in results), images))
        if together:
            mean, everyones = sum_of([gradients for gradients, _, _ in results]), [s for _, _, s in results for s in s]
            for replica in replicas:
                replica.apply([tensor.clone() for tensor in mean], everyones, lr)
            continue
        for replica, (gradients, _, statistics) in zip(replicas, results, strict=True):
            replica.apply(gradients, statistics, lr)
        own_images = [old + new for old, new in zip(own_images, seen, strict=True)]
        if (step + 1) % config.comm.period == 0 or (step + 1) % 4 == 0:
            shares = [count / sum(own_images) for count in own_images]
            for tensors in zip(*(replica.state() for replica in replicas), strict=True):
                mean = sum(share * tensor.double() for share, tensor in zip(shares, tensors, strict=True)).float()
                for tensor in tensors:
                    tensor.copy_(mean)
            own_images = [0] * world_size
    return replicas[0].weights(), losses
