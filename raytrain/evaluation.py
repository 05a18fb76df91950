"""Exact evaluation: every image once, for any number of workers."""

import itertools
import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from raytrain.data.loader import Batch
from raytrain.distributed import Runtime
from raytrain.errors import DataError

TOP5_FROM_CLASSES = 6
"""With fewer classes top-5 says nothing."""


def evaluate(model: nn.Module, batches: Iterable[Batch], num_classes: int, runtime: Runtime) -> dict[str, float]:
    """Top-1, top-5 (from 6 classes on) and cross-entropy in float32, and the number of images. All ranks must call.

    Each rank brings its own batches, any number of them; the only collectives are at the end. The result does not
    depend on who computed which batch.

    Raises:
        DataError: there is not one image that could be decoded.

    Returns:
        val/top1, val/top5 as fractions, val/loss as the mean over images, val/samples.
    """
    was_training = model.training
    model.eval()
    counts = torch.zeros(3, dtype=torch.int64, device=runtime.device)  # images, top-1, top-5
    losses = []
    for images, labels, count in batches:
        with torch.inference_mode():
            logits = model(images)
            right = logits.topk(min(5, num_classes)).indices == labels[:, None]
            counts += torch.stack([torch.tensor(count, device=runtime.device), right[:, 0].sum(), right.sum()])
            losses.append(functional.cross_entropy(logits, labels, reduction="none").double().sum())
    model.train(was_training)
    own_losses = torch.stack(losses).tolist() if losses else []
    samples, top1, top5 = runtime.sum(counts).tolist()
    if samples == 0:
        raise DataError("not one image of the validation set could be decoded")
    loss = math.fsum(itertools.chain.from_iterable(runtime.gather(own_losses)))  # rounded once, so in any order
    metrics = {"val/top1": top1 / samples, "val/top5": top5 / samples, "val/loss": loss / samples}
    if num_classes < TOP5_FROM_CLASSES:
        del metrics["val/top5"]
    return {**metrics, "val/samples": float(samples)}
