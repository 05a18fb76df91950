"""Randomness as a function: of (seed, epoch) for the order, of (seed, epoch, sample) for what is done to it."""

import numpy as np


def sample_rng(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random stream of one sample in one epoch (counter-based; Salmon et al. 2011)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, sample]))


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch takes its samples: int64 [count], each number below count once."""
    own_stream = np.random.Philox(key=[seed, epoch], counter=[0, 0, 1, 0])  # no sample's
    return np.random.Generator(own_stream).permutation(count)
