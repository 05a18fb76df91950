"""Measures one thing against its reference, alternating in one run.

python -m raytrain.bench step [--workers 2] [--rounds 7] [--steps 10] [--json PATH] [--markdown PATH]
python -m raytrain.bench data [--path DIR] [--rounds 5] [--images 1500] [--threads N] [--json PATH] [--markdown PATH]
python -m raytrain.bench start [--rounds 5] [--files 200000] [--json PATH] [--markdown PATH]
python -m raytrain.bench tracker [--rounds 7] [--steps 30] [--json PATH] [--markdown PATH]
python -m raytrain.bench checkpoint [--rounds 5] [--saves 8] [--spacing 3] [--json PATH] [--markdown PATH]
python -m raytrain.bench comm [section.key=value ...] [--workers N] [--predict 8,32,128] [--top1 SEEDS] [--rounds 5]
    [--steps 3] [--strategies a,b] [--picture PATH] [--tracking URI] [--json PATH] [--markdown PATH]
python -m raytrain.bench comm --hosts 4 [--workers-per-host 1] [--deal node] [--rate 1gbit] [--find-rate 0.82] ...

step        the training loop against a bare DistributedDataParallel loop, and exact reduction against float
data        the loader, from files and from prepared images, against torchvision's ImageFolder and DataLoader
start       listing a large folder against ImageFolder, opening 1.3 million rows, the next epoch's order
tracker     what an MLflow that is stopped, hangs or fails costs a step, against one that answers
checkpoint  what one costs the training, against a synchronous save
comm        strategies of communication against DistributedDataParallel, on the Ray cluster at RAY_ADDRESS or this
            machine, or with --hosts on links of a given rate between namespaces of this machine (root on Linux)
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain.errors import ConfigError, RaytrainError

if TYPE_CHECKING:
    from raytrain.bench.comm_ranks import Ranks
    from raytrain.bench.report import Report

PICTURES = (".png", ".svg", ".pdf")
ON_HOSTS = ("workers_per_host", "deal", "rate", "find_rate")
"""Options of `comm` that need hosts whose links it shapes."""


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raytrain.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="name", required=True)
    step = names.add_parser("step", help="the training loop against a bare DistributedDataParallel loop")
    step.add_argument("--workers", type=_positive, default=2, help="processes, one a GPU where there are any")
    step.add_argument("--rounds", type=_positive, default=7, help="measured rounds, after one to warm up")
    step.add_argument("--steps", type=_positive, default=10, help="optimizer steps of each side in a round")
    data = names.add_parser("data", help="the loader against torchvision's ImageFolder and DataLoader")
    data.add_argument("--path", metavar="DIR", type=Path, help="with train/CLASS/* and val/CLASS/*; else photographs")
    data.add_argument("--rounds", type=_positive, default=5, help="measured rounds, after one to warm up")
    data.add_argument("--images", type=_positive, default=1500, help="images in a pass; 1500 take 2 GB of $TMPDIR")
    data.add_argument("--threads", type=_positive, help="loader threads and DataLoader workers; else one a core")
    start = names.add_parser("start", help="how soon a large dataset can be read")
    start.add_argument("--rounds", type=_positive, default=5, help="measured rounds, after one to warm up")
    start.add_argument("--files", type=_positive, default=200_000, help="in the folder that is listed")
    checkpoint = names.add_parser("checkpoint", help="what a checkpoint costs, against a synchronous save")
    checkpoint.add_argument("--rounds", type=_positive, default=5, help="measured rounds, after one to warm up")
    checkpoint.add_argument("--saves", type=_positive, default=8, help="checkpoints in a round")
    checkpoint.add_argument("--spacing", type=_positive, default=3, help="seconds of training from one to the next")
    tracker = names.add_parser("tracker", help="what an outage of MLflow costs a step")
    tracker.add_argument("--rounds", type=_positive, default=7, help="measured rounds, after one to warm up")
    tracker.add_argument("--steps", type=_positive, default=30, help="steps of each side in a round")
    comm = names.add_parser("comm", help="strategies of communication against DistributedDataParallel")
    comm.add_argument("recipe", nargs="*", metavar="section.key=value", help="what a worker computes")
    comm.add_argument("--workers", type=_positive, help="on the Ray cluster; else one a GPU, or a node")
    comm.add_argument("--hosts", type=_positive, help="in network namespaces of this machine, in place of the cluster")
    comm.add_argument("--workers-per-host", type=_positive, help="processes on each of them, 1 by default")
    comm.add_argument("--deal", choices=["node", "round"], help="ranks host by host, as by default, or in turn")
    comm.add_argument("--rate", type=_words, help="of the links, several by commas; unshaped,1gbit by default")
    comm.add_argument("--find-rate", type=float, metavar="FRACTION", help="that ddp falls to; then a tenth of it too")
    comm.add_argument("--rounds", type=_positive, default=5, help="measured rounds; each turn in them warms up")
    comm.add_argument("--steps", type=_positive, default=3, help="optimizer steps of each strategy in a round")
    comm.add_argument("--strategies", type=_words, help="by commas; else all there are")
    comm.add_argument("--predict", type=_numbers, default=[], help="the efficiency for these numbers of workers")
    comm.add_argument("--top1", type=_positive, metavar="SEEDS", default=0, help="of trainings on the digits, too")
    comm.add_argument("--picture", metavar="PATH", type=Path, help="draw the figures there")
    comm.add_argument("--tracking", metavar="URI", help="store table, figures and picture in MLflow")
    runs = {step: _step, data: _data, start: _start, checkpoint: _checkpoint, tracker: _tracker, comm: _comm}
    for command, run in runs.items():
        command.add_argument("--json", metavar="PATH", help="write the figures there too")
        command.add_argument("--markdown", metavar="PATH", type=Path, help="write the table there too")
        command.set_defaults(run=run)
    args = parser.parse_args(words)
    try:
        _check_paths(args)
        _publish(args.run(args), args)
    except RaytrainError as error:
        print(f"raytrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _step(args: argparse.Namespace) -> "Report":
    from raytrain.bench.step import bench_step

    return bench_step(args.workers, args.rounds, args.steps)


def _data(args: argparse.Namespace) -> "Report":
    from raytrain.bench.data import bench_data

    return bench_data(args.path, args.rounds, args.images, args.threads)


def _start(args: argparse.Namespace) -> "Report":
    from raytrain.bench.start import bench_start

    return bench_start(args.rounds, args.files)


def _checkpoint(args: argparse.Namespace) -> "Report":
    from raytrain.bench.checkpoint import bench_checkpoint

    return bench_checkpoint(args.rounds, args.saves, args.spacing)


def _tracker(args: argparse.Namespace) -> "Report":
    from raytrain.bench.tracker import bench_tracker

    return bench_tracker(args.rounds, args.steps)


def _comm(args: argparse.Namespace) -> "Report":
    from raytrain.bench.comm import Wanted, bench_comm
    from raytrain.bench.comm_rank import STRATEGIES
    from raytrain.bench.comm_report import tracked

    if args.hosts is None and (unfit := [key for key in ON_HOSTS if getattr(args, key) is not None]):
        raise ConfigError(f"--{unfit[0].replace('_', '-')} is for --hosts; a cluster has the links that it has")
    if args.hosts is not None and args.workers is not None:
        raise ConfigError("--workers is for a Ray cluster; with --hosts it is --workers-per-host")
    if args.rate and args.find_rate is not None:
        raise ConfigError("--find-rate finds the rates; leave --rate out")
    rates = args.rate or (["unshaped", "1gbit"] if args.hosts else ["unshaped"])
    wanted = Wanted(
        rates=[None if rate == "unshaped" else rate for rate in rates],
        rounds=args.rounds,
        steps=args.steps,
        strategies=args.strategies or [name for name, one in STRATEGIES.items() if not (args.hosts and one.needs_ray)],
        recipe=args.recipe,
        fall_to=args.find_rate,
        predict=args.predict,
        seeds=args.top1,
    )
    if args.hosts and (unfit := [name for name in wanted.strategies if STRATEGIES[name].needs_ray]):
        raise ConfigError(f"{unfit[0]} needs a parameter server, which only a Ray cluster has; run without --hosts")
    params = {name: str(value) for name, value in vars(args).items() if name != "run"}
    with tracked(args.tracking, params) as store, _ranks(args) as (ranks, place):
        report = bench_comm(wanted, ranks, place)
        store(report)
    return report


@contextmanager
def _ranks(args: argparse.Namespace) -> "Iterator[tuple[Ranks, str]]":
    """The workers of `comm`, and what they are in words."""
    if args.hosts is None:
        from raytrain.bench.comm_ray import on_cluster

        with on_cluster(args.workers, args.recipe) as found:
            yield found
        return
    from raytrain.bench.comm_hosts import Layout, on_hosts

    layout = Layout(args.hosts, args.workers_per_host or 1, args.deal or "node")
    with on_hosts(layout, args.recipe) as ranks:
        place = f"{layout.world_size} workers of {layout.threads} thread(s), gloo, on {layout.hosts} hosts"
        yield ranks, f"{place} in network namespaces of one machine"


def _check_paths(args: argparse.Namespace) -> None:
    """Raises ConfigError where what is measured could not be written."""
    paths = {name: Path(path) for name in ("json", "markdown", "picture") if (path := getattr(args, name, None))}
    for name, path in paths.items():
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.parent}")
    if "picture" in paths and paths["picture"].suffix not in PICTURES:
        raise ConfigError(f"--picture {paths['picture']}: its name must end in {', '.join(PICTURES)}")


def _publish(report: "Report", args: argparse.Namespace) -> None:
    print(report.table())
    if args.json:
        report.write_json(args.json)
    if args.markdown:
        args.markdown.write_text(report.table() + "\n", encoding="utf-8")
    if getattr(args, "picture", None):
        from raytrain.bench.comm_report import CommReport

        assert isinstance(report, CommReport)
        report.draw().savefig(args.picture, dpi=130)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [_positive(word) for word in _words(text)]


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # folders and hosts are removed
    sys.exit(main(sys.argv[1:]))
