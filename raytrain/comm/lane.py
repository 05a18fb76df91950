"""Where communication runs beside the computation."""

import queue
import threading
from collections.abc import Callable

import torch

Future = torch.futures.Future[torch.Tensor]


class Lane:
    """Runs jobs one after another, in the order in which they are given, so that all ranks' collectives pair up.

    A job is straight-line code with blocking collectives. On a CPU it runs in a thread; on a GPU at once, on a stream
    of the lane's own, where a collective blocks the stream and not the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], None], torch.Tensor]] = queue.SimpleQueue()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        else:
            threading.Thread(target=self._work, args=(torch.get_num_threads(),), name="comm", daemon=True).start()

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
        if self._error is not None:
            raise self._error

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while True:
            future, job, tensor = self._jobs.get()
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - whoever calls `check` raises it
                self._error = error
            future.set_result(tensor)
            del future, job, tensor  # or they would live until the next ones come
