"""Brings a run into MLflow from its directory: what an outage kept from it, or all of it into another server.

    python -m raytrain.rebuild RUN_DIRECTORY [tracking.uri=URI] [tracking.experiment=NAME]

The run in MLflow that the directory names is completed, where it is there; else a new one is made, with parameters,
metrics, files, learning curves and the model, and the directory names that from then on. RUN_DIRECTORY may be in an
object store. Exit codes: 0 done, 2 the user's error, 1 MLflow does not have all of it.
"""

import sys
from collections.abc import Sequence

from raytrain.commandline import read_overrides
from raytrain.errors import ConfigError, RaytrainError


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    if "--help" in words or "-h" in words:
        print((__doc__ or "").strip())
        return 0
    try:
        places = [word for word in words if "=" not in word]
        overrides = read_overrides(word for word in words if "=" in word)
        if len(places) != 1 or any(place.startswith("-") for place in places):
            raise ConfigError("name one run directory, such as runs/NAME; see --help")
        if others := [key for key in overrides if key not in ("tracking.uri", "tracking.experiment")]:
            raise ConfigError(f"{others[0]} cannot be changed here; only tracking.uri and tracking.experiment can")

        from raytrain.results import rebuild

        run = rebuild(places[0], overrides, lambda text: print(f"warning: {text}", file=sys.stderr))
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr)
        return error.exit_code
    if run is not None:
        print(f"run {run.run_id} of experiment {run.experiment} at {run.uri} has all of {places[0]}")
    return 0 if run is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
