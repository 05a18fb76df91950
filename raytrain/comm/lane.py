"""Where communication runs beside the computation."""

import queue
import threading
import weakref
from collections.abc import Callable

import torch

Future = torch.futures.Future[torch.Tensor]
Jobs = queue.SimpleQueue[tuple[Future, Callable[[], None], torch.Tensor] | None]


class Lane:
    """Runs jobs one after another, in the order in which they are given, so that all ranks' collectives pair up.

    A job is straight-line code with blocking collectives. On a CPU it runs in a thread, which ends with the lane; on a
    GPU at once, on a stream of the lane's own, where a collective blocks the stream and not the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._errors: list[BaseException] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            return
        self._jobs: Jobs = queue.SimpleQueue()
        arguments = (self._jobs, self._errors, torch.get_num_threads())
        threading.Thread(target=_work, args=arguments, name="comm", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None], tensor: torch.Tensor) -> Future:
        """Gives a job, and the tensor that it works on, which the future returns when the job is done.

        On a GPU the future's `wait` makes the caller's stream wait. Where a job has failed, `check` says so.
        """
        if self._device.type != "cuda":
            future: Future = torch.futures.Future()
            self._jobs.put((future, job, tensor))
            return future
        future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job()
            future.set_result(tensor)
        return future

    def check(self) -> None:
        """Raises what a job has raised."""
        if self._errors:
            raise self._errors[0]


def _work(jobs: Jobs, errors: list[BaseException], threads: int) -> None:
    """Does jobs, until there is None; after one that has failed no other is done."""
    torch.set_num_threads(threads)
    while (given := jobs.get()) is not None:
        future, job, tensor = given
        try:
            if not errors:
                job()
        except BaseException as error:  # noqa: BLE001 - whoever calls `check` raises it
            errors.append(error)
        future.set_result(tensor)
        del given, future, job, tensor  # or they would live until the next ones come
