"""MLflow, in its only place: one run that is started, fed, given its artifacts and ended.

The driver calls `start_run` before anything is loaded, and gets a `TrackedRun` to hand to the worker of
rank 0, whose `MetricSender` sends metrics beside the training. At the end the driver adds the files, the
curves and the model, and calls `finish_run`.

What fails at the start is a `TrackingError` within seconds. What fails later costs a warning and no more:
the run directory has the same numbers and files. Nothing here touches MLflow's process-wide state (active
run, tracking URI, experiment), so that a user's own MLflow code beside it is left alone.
"""

from raytrain.tracking.artifacts import log_curves, log_files, log_model
from raytrain.tracking.client import TrackedRun
from raytrain.tracking.sender import MetricSender, log_missing
from raytrain.tracking.start import finish_run, how_to_open, is_local, resolve_uri, start_run

__all__ = [
    "MetricSender",
    "TrackedRun",
    "finish_run",
    "how_to_open",
    "is_local",
    "log_curves",
    "log_files",
    "log_missing",
    "log_model",
    "resolve_uri",
    "start_run",
]
