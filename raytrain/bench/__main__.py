"""Measures one thing against its reference, alternating in one run.

python -m raytrain.bench step [--workers 2] [--rounds 7] [--steps 10] [--json PATH]

step    the training loop against a bare DistributedDataParallel loop, and exact reduction against float
"""

import argparse
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raytrain.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="name", required=True)
    step = names.add_parser("step", help="the training loop against a bare DistributedDataParallel loop")
    step.add_argument("--workers", type=int, default=2, help="processes, one a GPU where there are any")
    step.add_argument("--rounds", type=int, default=7, help="measured rounds, after one to warm up")
    step.add_argument("--steps", type=int, default=10, help="optimizer steps of each side in a round")
    step.add_argument("--json", metavar="PATH", help="write the figures there too")
    args = parser.parse_args(words)

    from raytrain.bench.step import bench_step

    report = bench_step(args.workers, args.rounds, args.steps)
    print(report.table())
    if args.json:
        report.write_json(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
