"""Gradients that are reduced together, and where they lie in a vector of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class Bucket:
    """Gradients of some parameters."""

    index: int
    """Among the step's buckets, in the order in which a backward pass comes to them."""
    tensor: torch.Tensor
    """All of them, flat, float32 [elements]; each parameter's in the order in which it lies in memory."""
    parameters: Sequence[torch.Tensor]
    is_last: bool

    def views(self) -> list[torch.Tensor]:
        """The part of each parameter."""
        return list(self.tensor.split([parameter.numel() for parameter in self.parameters]))


class FlatOrder:
    """One vector of all parameters' elements, in the order of the model, whatever the buckets are."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.size = sum(sizes)
        self._start = dict(zip(parameters, accumulate([0, *sizes]), strict=False))

    def read(self, vector: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The bucket's part of a vector, in the bucket's order: a copy."""
        return torch.cat([vector[self._start[p] : self._start[p] + p.numel()] for p in bucket.parameters])

    def write(self, vector: torch.Tensor, bucket: Bucket, values: torch.Tensor) -> None:
        """Puts values in the bucket's order into its part of a vector."""
        pieces = values.split([p.numel() for p in bucket.parameters])
        for parameter, piece in zip(bucket.parameters, pieces, strict=True):
            vector[self._start[parameter] : self._start[parameter] + parameter.numel()] = piece
