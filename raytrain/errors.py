"""The errors that raytrain raises, and the exit code that each one ends a command with.

    RaytrainError            1   something failed
    ├── UserError            2   a message for the user: what is wrong, where, what to do
    │   ├── ConfigError          a key or a value in the configuration
    │   ├── DataError            images, labels, class names
    │   ├── ResourceError        CPUs, GPUs, nodes
    │   ├── RunError             the run directory: exists already, or does not, or cannot be written
    │   ├── CheckpointError      no checkpoint that verifies
    │   └── TrackingError        MLflow refuses to store
    │       └── TrackerDownError MLflow does not answer
    ├── NonFiniteError       1   a loss or a weight is no longer a number
    ├── WorkerError          1   a worker process died or raised
    └── StoppedError   130/143   Ctrl-C or SIGTERM

Each takes one message. They are pickled from a worker to the driver, so they hold nothing else that
cannot be rebuilt from `args`.
"""

import signal


class RaytrainError(Exception):
    """The root of the tree."""

    exit_code = 1


class UserError(RaytrainError):
    """A fault that the user can put right. Shown as one message, without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """A key or a value in the configuration."""


class DataError(UserError):
    """An image, a label or a class name."""


class ResourceError(UserError):
    """More CPUs, GPUs or nodes are needed than there are."""


class RunError(UserError):
    """The run directory exists already, or does not, or cannot be written."""


class CheckpointError(UserError):
    """No checkpoint that verifies."""


class TrackingError(UserError):
    """MLflow cannot be reached, or refuses to store."""


class TrackerDownError(TrackingError):
    """MLflow cannot be reached, or does not answer; it may at another time."""


class NonFiniteError(RaytrainError):
    """A loss or a weight is no longer a number."""


class WorkerError(RaytrainError):
    """A worker process died, or raised something that is none of the above."""


class StoppedError(RaytrainError):
    """The run was asked to stop by a signal, and did so after a whole step."""

    def __init__(self, message: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(message, int(signum))
        self.exit_code = 128 + int(signum)  # as a shell reports it

    def __str__(self) -> str:
        return str(self.args[0])
