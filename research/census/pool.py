"""Worker processes that are replaced when they crash or hang, so that no single model type can stop the census."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SECONDS, TYPES_EACH = 240.0, 40
"""Time limit in seconds for one model type, and number of model types for one worker; a worker's imports stay in
memory.
"""
JUDGE = "research.census.worker"
"""Module that a worker process runs."""


class Worker:
    """A worker process, and the thread that reads its verdicts.

    Attributes:
        process: the process.
        answers: lines that the process printed and nobody has read yet; None once it has ended.
        done: number of model types sent to it.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", JUDGE]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.done = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Put every line that the process prints into `answers`, and None when it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, model_type: str, seconds: float) -> dict[str, Any] | None:
        """Return the verdict on a model type; None if the process ended.

        Raises:
            queue.Empty: it took too long.
        """
        self.done += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{model_type}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.answers.get(timeout=seconds)
        return None if line is None else json.loads(line)

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.wait()


def judged(model_types: Sequence[str], on_verdict: Callable[[dict[str, Any]], None]) -> None:
    """Judge the model types in order, in worker processes, and call `on_verdict` with each verdict. A crash or a
    timeout gives the outcome "not built".
    """
    worker: Worker | None = None
    try:
        for model_type in model_types:
            if worker is None or worker.done >= TYPES_EACH:
                if worker is not None:
                    worker.end()
                worker = Worker()
            reason = "the process ended"
            try:
                verdict = worker.ask(model_type, SECONDS)
            except queue.Empty:
                verdict, reason = None, f"more than {SECONDS:.0f} seconds"
            if verdict is None:
                worker.end()
                worker = None
                verdict = {"model_type": model_type, "outcome": "not built", "reason": reason, "seconds": SECONDS}
            on_verdict(verdict)
    finally:
        if worker is not None:
            worker.end()
