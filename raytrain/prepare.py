"""Makes a dataset into Arrow shards, which train fastest.

    python -m raytrain.prepare SRC DST [--max-side 400 | --short-side 256 | --raw SIZE] [options]

SRC is a folder of train/CLASS/* and val/CLASS/*, of Parquet files or of WebDataset tar shards, or shards made before,
or a single set of these; DST is where train/ and val/ go. Both may be paths, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.
Then: python -m raytrain.fit ... data.source=arrow data.path=DST

It runs on all cores, or over the Ray cluster at RAY_ADDRESS. When it was interrupted, by whatever, the same command
goes on where it was. Images stand upright in the end, as their EXIF orientation says. Bad ones are left out and listed.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from raytrain.errors import RaytrainError


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raytrain.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--max-side", type=_positive, metavar="PIXELS", help="resize to a longer side of at most that")
    size.add_argument("--short-side", type=_positive, metavar="PIXELS", help="resize to a shorter side of at most that")
    size.add_argument(
        "--raw", type=_positive, metavar="PIXELS", help="as --max-side, and store pixels in place of JPEG"
    )
    parser.add_argument("--quality", type=_quality, default=90, help="of JPEG, 1 to 95 (default: 90)")
    parser.add_argument("--shard-gib", type=_size, default=1.0, help="most that a shard may take (default: 1)")
    parser.add_argument("--workers", type=_positive, help="processes (default: one a core)")
    parser.add_argument(
        "--form", choices=("folder", "parquet", "webdataset", "arrow"), help="of SRC (default: found from its files)"
    )
    parser.add_argument("--image-column", help="of Parquet (default: found from the schema)")
    parser.add_argument("--label-column", help="of Parquet (default: found from the schema)")
    parser.add_argument(
        "--max-bad-fraction", type=_fraction, default=0.01, help="share of images that may be bad (default: 0.01)"
    )
    args = parser.parse_args(words)

    try:
        from raytrain.data.transcode import Settings
        from raytrain.preparation import Request, prepare, report

        settings = Settings(args.max_side, args.short_side, args.raw, args.quality)
        request = Request(
            args.source,
            args.destination,
            settings,
            args.shard_gib,
            args.workers,
            args.form,
            args.image_column,
            args.label_column,
            args.max_bad_fraction,
        )
        made = prepare(request, lambda text: print(text, flush=True))
        print(report(made))
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _quality(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 95:
        raise argparse.ArgumentTypeError("must lie within 1 and 95")
    return value


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must lie within 0 and 1")
    return value


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code == 130 and threading.active_count() > 1:  # a part that is made on a thread would be waited for
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
