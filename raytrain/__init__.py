"""raytrain: distributed training of image classifiers on Ray."""

__version__ = "0.1.0"
