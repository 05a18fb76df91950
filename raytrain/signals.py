"""The signals that ask a process to stop after its present step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what SLURM sends some time before SIGTERM, and means the same here."""

_received: list[int] = []


def listen() -> None:
    """From now on they are noted in place of their effects. In a main thread only."""
    for number in STOPPING:
        signal.signal(number, _note)


@contextmanager
def listening() -> Iterator[list[int]]:
    """The signals that have come since the block began, in place of their effects."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    _received.clear()
    listen()
    try:
        yield _received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """One that comes in the block ends the process with its code; in a main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_to_stop() -> int:
    """The first one that has come, or 0."""
    return _received[0] if _received else 0


def _note(number: int, _: object) -> None:
    # whoever waits for the process knows SIGTERM by its exit code
    _received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + (signal.SIGTERM if number == signal.SIGUSR1 else number))
