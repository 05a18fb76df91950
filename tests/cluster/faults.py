"""A run on three hosts that suffers one fault after the other, how soon it went on, and whether it ended as it should.

    python -m tests.cluster.faults --faults 30 --seed 1 --json FILE     faults of all kinds, drawn from the seed
    python -m tests.cluster.faults --measure kill-worker --times 5      one fault again and again

Needs what `hosts` needs. Ray's head, the driver and an MLflow server are in the first host, whose power stays on.
"""

import argparse
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cluster import checks
from tests.cluster.lab import StuckError, lab_in

STEPS_A_FAULT, PACE_SECONDS = 45, 0.25


def kill_worker(lab):
    process, where = lab.some_worker()
    process.kill()
    return {"where": where}


def stop_worker(lab):
    process, where = lab.some_worker()
    process.terminate()
    return {"where": where}


def freeze_worker(lab):
    process, where = lab.some_worker()
    process.suspend()
    return {"where": where}


def power_off(lab):
    host = lab.some_host()
    lab.gone.append(host)
    host.power_off()
    return {"where": host.name}


def cut_link(lab):
    host = lab.some_host()
    lab.gone.append(host)
    host.cut()
    return {"where": host.name}


def add_host(lab):
    """The one that went first comes back. The time counts from when its Ray is there, or its link."""
    host = lab.gone.pop(0)
    if host.is_on:
        host.mend()
        return {"where": f"{host.name}, mended"}
    host.power_on()
    lab.start_ray(host)
    return {"where": f"{host.name}, on again", "time": time.time()}


def kill_driver(lab):
    seen = lab.end_driver(signal.SIGKILL, -signal.SIGKILL)
    lab.start_driver("--resume")
    return {"where": "the driver", "seen": seen}


def stop_driver(lab):
    seen = lab.end_driver(signal.SIGTERM, 143)
    lab.start_driver("--resume")
    return {"where": "the driver", "seen": seen}


def stop_mlflow(lab):
    lab.hosts[0].signal(lab.server, signal.SIGTERM)
    lab.server.wait(60)
    seconds = lab.random.uniform(10, 35)
    lab.later(seconds, "mlflow", lab.start_mlflow)
    return {"where": f"for {seconds:.0f} s", "lasts": seconds}


def hang_mlflow(lab):
    processes = psutil.Process(lab.server.pid).children(recursive=True)
    for process in processes:
        process.suspend()
    processes.append(psutil.Process(lab.server.pid))  # nsenter stops itself when its child is stopped
    seconds = lab.random.uniform(10, 35)
    lab.later(seconds, "mlflow", lambda: [process.resume() for process in processes])
    return {"where": f"for {seconds:.0f} s", "lasts": seconds}


def full_disk(lab):
    path = lab.disk / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    seconds = lab.random.uniform(10, 20)
    lab.later(seconds, "disk", path.unlink)
    return {"where": f"for {seconds:.0f} s", "lasts": seconds}


def corrupt_checkpoint(lab):
    process, where = lab.some_worker()
    path = lab.wait("a checkpoint", lambda: checks.newest(lab.run)) / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    process.kill()
    lab.corrupted.append(path.parent.name)
    return {"where": f"{path.parent.name}, and {where} killed"}


KINDS = {
    "kill-worker": kill_worker,
    "stop-worker": stop_worker,
    "freeze-worker": freeze_worker,
    "power-off": power_off,
    "cut-link": cut_link,
    "add-host": add_host,
    "kill-driver": kill_driver,
    "stop-driver": stop_driver,
    "stop-mlflow": stop_mlflow,
    "hang-mlflow": hang_mlflow,
    "full-disk": full_disk,
    "corrupt-checkpoint": corrupt_checkpoint,
}
FRESH = "fresh-start"
TAKES_A_HOST = ("power-off", "cut-link")
BESIDE_THE_STEPS = {"stop-mlflow": "warning: MLflow", "hang-mlflow": "warning: MLflow", "full-disk": "warning: cannot"}
"""Faults that do not end the workers, and what the driver says of them."""


def draw(kinds, count, seed):
    """A sequence of about so many faults, of each kind as many; a host that goes comes back one or two later."""
    chance, kinds = random.Random(seed), [kind for kind in kinds if kind != "add-host"]
    drawn = []
    while len(drawn) + sum(kind in TAKES_A_HOST for kind in drawn) < count or len(drawn) < len(kinds) < count:
        left = [kind for kind in kinds if drawn.count(kind) == len(drawn) // len(kinds)]
        drawn.append(chance.choice(left))
    faults, missing = [], 0
    for kind in drawn:
        if missing and (chance.random() < 0.5 or missing == 2):
            faults.append("add-host")
            missing -= 1
        faults.append(kind)
        missing += kind in TAKES_A_HOST
    return [*faults, *["add-host"] * missing]


def suffer(lab, kind):
    """Has the fault happen, and returns what became of it when the run has taken a new step."""
    beside = kind in BESIDE_THE_STEPS or (lab.is_fixed and kind == "add-host")
    attempt, last = lab.steps.attempt, lab.steps.last()
    row = {"kind": kind, "time": time.time(), "attempt": attempt, "step": last} | KINDS[kind](lab)

    def next_step():
        if beside:
            return lab.steps.next_after(last, row["time"], -1)
        return lab.steps.next_after(lab.steps.last(attempt), row["time"], attempt)

    row["next"] = lab.wait(f"a new step after {row}", next_step)
    row["next_seconds"] = row["next"] - row["time"]
    first = lab.steps.first_of_attempt_after(attempt)
    row["repeated"] = 0 if first is None or beside else lab.steps.last(attempt) + 1 - first
    complete(lab, row)
    return finished(row)


def finished(row):
    """Prints a row, and returns it."""
    print(
        f"{row['kind']:<18} {seconds(row.get('seen_seconds')):>6} s seen {seconds(row['next_seconds']):>6} s to the "
        f"next step {row.get('repeated', 0):>3} again; {row['where']}; {row.get('reason', '')}",
        flush=True,
    )
    return row


def complete(lab, row, until=math.inf):
    """Adds when the fault was seen, and what was said of it."""
    if row["kind"] == FRESH:
        return
    if text := BESIDE_THE_STEPS.get(row["kind"]):
        end = row["time"] + row["lasts"] + 5
        said = [(when, line) for when, line in lab.said if row["time"] <= when <= end and text in line]
    else:
        events = [event for event in lab.events(row["time"] - 0.01) if event["kind"] in ("failure", "resize", "stop")]
        said = [(event["time"], event["reason"].splitlines()[0]) for event in events if event["time"] < until]
    when, row["reason"] = said[0] if said else (None, "")
    when = row.get("seen") or when
    row["seen_seconds"] = None if when is None else max(0.0, when - row["time"])


def campaign(lab, kinds, rows, settle=(4, 9)):
    """Starts the run, has it suffer, and lets it end. Adds a row for each fault."""
    lab.set_pace(PACE_SECONDS)
    lab.start_driver()
    lab.wait("the first steps", lambda: lab.steps.last() >= 3)
    for number, kind in enumerate(kinds):
        left = max(1, lab.total_steps - lab.steps.last())
        lab.set_pace(min(2.0, max(PACE_SECONDS, 25 * (len(kinds) - number) / left - 0.2)))
        lab.pause(lab.random.uniform(*settle))
        lab.wait("the disk", lambda: not lab.lacks("disk"))
        if kind in ("stop-mlflow", "hang-mlflow"):
            lab.wait("the MLflow server's return", lambda: not lab.lacks("mlflow"))
            lab.wait_for_mlflow()
        step = lab.steps.last()
        lab.wait("a step", lambda: lab.steps.last() > step)  # noqa: B023
        rows.append(start_afresh(lab, number) if kind == FRESH else suffer(lab, kind))
    lab.wait("all that was taken away", lambda: not lab.lacks())
    lab.wait_for_mlflow()
    lab.finishing = True
    lab.set_pace(0)
    lab.wait("the run's end", lambda: lab.driver.poll() == 0, 900)
    for row, until in zip(rows, [*(row["time"] for row in rows[1:]), math.inf], strict=True):
        complete(lab, row, until)


def start_afresh(lab, number):
    """How long another run takes to its first step, to compare with; the run is stopped meanwhile."""
    lab.end_driver(signal.SIGTERM, 143)
    steps, row = checks.Steps(lab.steps.folder, f"fresh-{number}"), {"kind": FRESH, "time": time.time()}
    process = lab.fit(steps.run, "train.max_steps=2", "schedule.warmup_epochs=0")
    row["next"] = lab.wait("a first step", lambda: steps.next_after(-1, row["time"], -1))
    lab.wait("its end", lambda: process.poll() == 0)
    lab.start_driver("--resume")
    return finished(row | {"where": "another run", "next_seconds": row["next"] - row["time"]})


def seconds(value):
    return "-" if value is None else f"{value:.1f}"


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else "-"


def table(rows):
    """What the rows of each kind come to, as Markdown."""
    lines = ["| fault | count | seconds to detect | seconds to next step | steps repeated |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        columns = ([row.get(key) for row in of_kind] for key in ("seen_seconds", "next_seconds", "repeated"))
        cells = [spread([value for value in column if value is not None]) for column in columns]
        lines.append(f"| {kind} | {len(of_kind)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words=None):
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="how many")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of which kinds")
    parser.add_argument("--seed", type=int, default=1, help="of their order")
    parser.add_argument("--measure", choices=KINDS, help="this one alone")
    parser.add_argument("--times", type=int, default=5, help="how often, with --measure")
    parser.add_argument("--float", action="store_true", help="floating-point sums of two workers")
    parser.add_argument("--json", type=Path, help="for all that was measured")
    parser.add_argument("--workdir", type=Path, help="for logs, which stay there")
    options = parser.parse_args(words)
    if options.measure:
        after = {**dict.fromkeys(TAKES_A_HOST, "add-host"), "kill-driver": FRESH}.get(options.measure)
        kinds = [options.measure, *filter(None, [after])] * options.times
    else:
        kinds = draw(options.kinds.split(","), options.faults, options.seed)
    folder = options.workdir or Path(tempfile.mkdtemp(prefix="raytrain-faults-"))
    print(f"{len(kinds)} faults in {folder}: {' '.join(kinds)}", flush=True)
    rows = []
    try:
        with lab_in(folder, 60 + STEPS_A_FAULT * len(kinds), is_fixed=options.float, seed=options.seed) as lab:
            campaign(lab, kinds, rows)
            verdicts = checks.verdicts(lab)
    except StuckError as error:
        verdicts = {"the run went on": [str(error)]}
    text = table(rows)
    print(text)
    for what, faults in verdicts.items():
        print(f"{what}: {'; '.join(faults) or 'OK'}")
    if options.json:
        content = {"options": vars(options), "rows": rows, "table": text, "verdicts": verdicts}
        options.json.write_text(json.dumps(content, indent=2, default=str))
    return int(any(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
