"""Processes that save checkpoints as fast as they can, to be killed while they do: `python -m ... FOLDER`.

A line on the standard input starts one, which says "begun PID" before its first save, and "ended" follows its end.
They are forked from one that has imported torch, so that a hundred of them take no longer than they live.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from raytrain import checkpoint
from raytrain.saver import Saver
from tests.places import at

LONGEST_SECONDS = 60


def weights_of(step):
    """What the network must hold after so many steps; no two steps have a value in common."""
    return {
        "fc.weight": torch.arange(4096.0).view(64, 64) + 10_000 * step,
        "fc.bias": torch.full((64,), -float(step)),
        "num_batches_tracked": torch.tensor(step),
    }


def training_of(step):
    return {"momentum": [weights_of(step)["fc.weight"] / 2], "updates": step}


def warn(text):
    print(text, file=sys.stderr)


def save_without_end(folder):
    newest = checkpoint.newest_valid(folder, warn)
    step = checkpoint.load_state(newest)["step"] if newest else 0
    saver = Saver(folder, keep_last=2, keep_best=0, warn=warn)
    weights, training = weights_of(step), training_of(step)
    end, parent = time.monotonic() + LONGEST_SECONDS, os.getppid()
    os.write(1, f"begun {os.getpid()}\n".encode())
    while time.monotonic() < end and os.getppid() == parent:
        step += 1
        for key, tensor in weights_of(step).items():  # in place, as an optimizer does while the last is written
            weights[key].copy_(tensor)
        training["momentum"][0].copy_(training_of(step)["momentum"][0])
        training["updates"] = step
        saver.save(step, {"model": weights}, training, {"metrics": {}})


def kill_at(folder, moments):
    """Yields after each of as many kills as there are moments: functions that return when it is time."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.killed_saves", str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        for wait in moments:
            parent.stdin.write("another\n")
            word, pid = parent.stdout.readline().split()
            assert word == "begun"
            wait()
            os.kill(int(pid), signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            yield
    finally:
        parent.stdin.close()
        try:
            parent.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            parent.kill()
            parent.wait()
        parent.stdout.close()


def main():
    torch.set_num_threads(1)
    for _ in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            try:
                save_without_end(at(sys.argv[1]))
            except Exception:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
