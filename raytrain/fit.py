"""Trains a classifier.

    python -m raytrain.fit [CONFIG] [section.key=value ...] [--resume] [--dry-run] [--help]

CONFIG is the name of one that ships or the path of a .yaml; without it, quickstart.
    --resume    continue a run from its newest valid checkpoint: run.name=NAME, or else the newest of CONFIG
    --dry-run   print the resolved config and what it works out to, and start nothing

torchrun --nproc-per-node 2 -m raytrain.fit ... does the same in torchrun's processes, without Ray.
Exit codes: 0 done, 2 the user's error, 1 any other failure, 130 and 143 interrupted.
"""

import os
import sys
from collections.abc import Sequence

from raytrain.commandline import Request, dump, help_text, parse
from raytrain.errors import ConfigError, RaytrainError

FLAGS = frozenset({"--resume", "--dry-run", "--help"})


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    try:
        if "--help" in words or "-h" in words:
            print(help_text(__doc__ or ""))
            return 0
        request = parse(words, "quickstart", FLAGS)
        if "--dry-run" in request.flags:
            _dry_run(request)
        elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
            from raytrain.standalone import run_standalone

            run_standalone(request)
        else:
            from raytrain.launch import launch

            launch(request)
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _dry_run(request: Request) -> None:
    from raytrain.describe import dry_run_text

    config = request.config
    num_images = config.data.num_train_images
    if num_images is None:
        from raytrain.data.source import is_read_in_place, open_sources

        if not is_read_in_place(config.data):
            raise ConfigError(
                f"data.source={config.data.source} of {config.data.path} would first be brought into data.cache_path; "
                "set data.num_train_images=N for a --dry-run"
            )
        num_images = len(open_sources(config.data).train.labels)
    print(dump(config))
    print(dry_run_text(config, num_images))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
