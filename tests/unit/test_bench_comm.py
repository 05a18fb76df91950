"""What `bench comm` makes of its figures, and what it refuses."""

import json

import pytest

from raytrain.bench.__main__ import main
from raytrain.bench.comm import Wanted, bench_comm
from raytrain.bench.comm_rank import STRATEGIES, Worker, make_digits_config
from raytrain.bench.comm_ranks import Measured, Probe, Ranks
from raytrain.bench.comm_report import CommReport
from raytrain.comm.predict import Computation, Sums
from raytrain.distributed import Runtime
from raytrain.errors import ConfigError

SPEEDS = {"computation": 400.0, "ddp": 100.0, "plain": 100.0, "fp16": 150.0, "onebit": 200.0}
COMPUTATION = Computation(forward=0.4, backward=0.4, update=0.16, buckets=((0.2, 1000),))


class Known(Ranks):
    """Four workers whose figures are known; slow links halve them."""

    world_size = 4

    def ask(self, method, *arguments):
        raise NotImplementedError

    def shape(self, rate):
        raise NotImplementedError

    def sent_on_wire(self):
        raise NotImplementedError

    def turn(self, name, rate, steps):
        del steps
        return Measured(SPEEDS[name] / (2 if rate else 1), 8e6, 7e6, 0.25)

    def probe(self, rate):
        return Probe(COMPUTATION, {"plain": Sums(4, 0.0, 0.00116 if rate else 0.001, 0.0)}, 4)

    def top1(self, name, seed):
        assert name in STRATEGIES
        return 0.98 - 0.01 * seed


def report(**keys):
    return bench_comm(Wanted(rounds=3, strategies=("plain", "fp16", "onebit"), **keys), Known(), "four of them")


def test_ratios_are_those_of_the_best(tmp_path):
    report(rates=(None, "100mbit")).write_json(str(tmp_path / "figures.json"))
    ratios = json.loads((tmp_path / "figures.json").read_text())["ratios"]
    assert {key: spread["median"] for key, spread in ratios.items()} == {
        "best_sync_vs_unshaped": pytest.approx(0.75),
        "best_sync_vs_plain": pytest.approx(1.5),
        "best_vs_unshaped": pytest.approx(1.0),
        "best_vs_plain": pytest.approx(2.0),
    }


def test_a_cluster_s_own_links_count_where_no_others_are(tmp_path):
    report().write_json(str(tmp_path / "figures.json"))
    ratios = json.loads((tmp_path / "figures.json").read_text())["ratios"]
    assert {key: spread["median"] for key, spread in ratios.items()} == {"best_sync_vs_plain": 1.5, "best_vs_plain": 2}


def test_a_line_of_the_table():
    """48 images of 4 workers at 75 a second; 192 of a step over 8 MB at 12.5 MB a second: 300."""
    lines = report(rates=("100mbit",), seeds=3).table().splitlines()
    head = next(line for line in lines if line.startswith("| median"))
    fp16 = next(line for line in lines if line.startswith("| fp16"))
    assert dict(zip(head.split(" | ")[1:], fp16.split(" | ")[1:], strict=True)) == {
        "images/s": "75 (75 - 75)",
        "of ddp at that rate": "1.50 (1.50 - 1.50)",
        "of the time lost to communication": "0.81 (0.81 - 0.81)",
        "of the time spent waiting": "0.25 (0.25 - 0.25)",
        "MB a step on the wire": "8.00 (8.00 - 8.00)",
        "MB a step by arithmetic": "7.00 (7.00 - 7.00)",
        "images/s that the wire lets through": "300 (300 - 300)",
        "top-1 on the digits |": "0.97 (0.96 - 0.98) |",
    }


def test_predictions_stand_beside_what_was_measured(tmp_path):
    """At 100 Mbit/s: 0.4 + 0.2 + 1.16 + 0.16 = 1.92 s, which is what 192 images take at 100 a second."""
    found = report(rates=(None, "100mbit"), predict=(4, 16))
    found.write_json(str(tmp_path / "figures.json"))
    content = json.loads((tmp_path / "figures.json").read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert rows["plain at 100mbit: predicted"]["median"] == pytest.approx(1920)
    assert rows["plain at 100mbit: step"]["median"] == pytest.approx(1000 * 192 / 50)
    assert content["ratios"]["plain at 100mbit: predicted_vs_measured"]["median"] == pytest.approx(0.5)
    assert rows["plain at 100mbit on 4"]["median"] == pytest.approx(0.96 / 1.92)
    assert rows["plain at 100mbit on 16"]["median"] == pytest.approx(0.96 / (0.76 + 1.16 * (15 / 16) / (3 / 4)))
    assert "| median (min - max) | efficiency on 4 workers | efficiency on 16 workers |" in found.table()


def test_what_one_host_sends_is_no_rate(tmp_path):
    """Nothing leaves it, and so no link limits it."""
    figures = {(None, "computation"): [Measured(4.0, 0.0, 0.0, None)], (None, "ddp"): [Measured(4.0, 0.0, 0.0, None)]}
    figures |= {("1gbit", name): [Measured(4.0, 0.0, 0.0, None)] for name in ("ddp", "plain")}
    found = CommReport.of(figures, ("plain",), (), (), {}, {}, images_per_step=8)
    assert "lets through" not in found.table()
    found.store(tmp_path)


def test_larger_clusters_are_predicted_and_no_smaller_ones():
    with pytest.raises(ConfigError, match=r"--predict 2: larger clusters than this one of 4 worker"):
        report(predict=(8, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 16])
def test_the_digits_are_trained_by_quickstart_s_batch(world_size):
    config = make_digits_config("onebit", 2, world_size)
    assert config.comm.compression == "onebit"
    assert (config.train.global_batch_size, config.run.seed) == (32, 2)
    assert 32 // config.train.micro_batch_size >= world_size


def test_more_workers_than_micro_batches_are_refused():
    with pytest.raises(ConfigError, match=r"scaling\.num_workers"):
        make_digits_config("plain", 0, 17)


@pytest.mark.parametrize("name", ["data_parallel", "computation", "onebit"])
def test_a_worker_takes_turns(name):
    worker = Worker(Runtime(), ("model.name=shufflenet_v2_x0_5", "data.image_size=32", "train.micro_batch_size=2"))
    worker.prepare(name)
    turn = worker.take(1, 3)
    assert turn["images"] == 6
    assert turn["seconds"] > 0
    assert turn["sent_bytes"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "1gbit"], "--rate is for --hosts"),
        (["--workers-per-host", "2"], "--workers-per-host is for --hosts"),
        (["--hosts", "2", "--workers", "4"], "--workers is for a Ray cluster"),
        (["--hosts", "2", "--rate", "1gb"], "'1gb' is no rate"),
        (["--hosts", "2", "--strategies", "fp8"], f"no strategy fp8; there are {', '.join(STRATEGIES)}"),
        (["--hosts", "2", "--strategies", "async"], "async needs a parameter server"),
        (["optim.lr=1"], "optim.lr"),
        (["--hosts", "2", "--rate", "0mbit"], "a link of 0mbit lets nothing through"),
        (["--hosts", "2", "--rate", "1gbit", "--find-rate", "0.8"], "leave --rate out"),
        (["--hosts", "2", "--find-rate", "5"], "between 0 and 1"),
        (["--hosts", "2", "--picture", "missing/a.png"], "there is no folder missing"),
        (["--hosts", "2", "--picture", "a.txt"], "must end in .png"),
        (["--json", "missing/a.json"], "there is no folder missing"),
        (["comm.compression=fp16"], "comm.compression=fp16: the benchmark sets this"),
        (["train.global_batch_size=4"], "train.global_batch_size=4: the benchmark sets this"),
        (["model.name=nonesuch"], "nonesuch"),
        (["train.max_steps=10", "schedule.warmup_epochs=5"], "schedule.warmup_epochs"),
        (["optim.name=adamw", "--strategies", "plain,async"], "async"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, words, message):
    assert main(["comm", *words]) == ConfigError.exit_code
    assert message in capsys.readouterr().err
