"""Folders as raytrain takes them."""

from raytrain.errors import RunError
from raytrain.storage import Storage


def at(path):
    """A run directory, or a folder of checkpoints: of a path, or of what is one already."""
    return Storage(str(path), RunError)
