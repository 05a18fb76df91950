"""Exact evaluation: every image once, for any number of workers."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from raytrain.data.loader import Batch
from raytrain.distributed import Runtime

TOP5_FROM_CLASSES = 6
"""With fewer classes top-5 says nothing."""
_LOSS_SCALE = 2.0**32


def evaluate(model: nn.Module, batches: Iterable[Batch], num_classes: int, runtime: Runtime) -> dict[str, float]:
    """Top-1, top-5 (from 6 classes on) and cross-entropy in float32, and the number of images. All ranks must call.

    Each rank brings its own batches, any number of them; the only collective is at the end. Counts and losses are
    summed as integers, so the result does not depend on who computed which batch.

    Returns:
        val/top1, val/top5 as fractions, val/loss as the mean over images, val/samples.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.int64, device=runtime.device)  # images, top-1, top-5, loss, losses not finite
    with torch.inference_mode():
        for images, labels in batches:
            logits = model(images)
            losses = functional.cross_entropy(logits, labels, reduction="none").double()
            finite = losses.isfinite()
            ranked = logits.topk(min(5, num_classes)).indices == labels[:, None]
            loss = losses.where(finite, 0).sum().mul(_LOSS_SCALE).round().long()
            counts = [
                torch.tensor(len(labels), device=runtime.device),
                ranked[:, 0].sum(),
                ranked.sum(),
                loss,
                (~finite).sum(),
            ]
            sums += torch.stack(counts)
    model.train(was_training)
    samples, top1, top5, loss_sum, not_finite = runtime.sum(sums).tolist()
    metrics = {"val/top1": top1 / samples, "val/top5": top5 / samples, "val/samples": float(samples)}
    metrics["val/loss"] = float("nan") if not_finite else loss_sum / _LOSS_SCALE / samples
    if num_classes < TOP5_FROM_CLASSES:
        del metrics["val/top5"]
    return metrics
