"""Processes without the shape checks of the tests, in which torch.compile and torch.export can trace headwise.

Torch's compiler takes seconds for its imports and its first graph. One server for all workers of a test run does both
once, and forks a new process for every piece of code. The pieces start from the same state, and cannot influence each
other.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import ClassVar

from filelock import FileLock


class TracingServer:
    """Runs Python code in processes that a server forks; the first use in a test run starts the server.

    Args:
        folder: folder that the workers of one test run share.
        process: id of the process at whose end the server ends.
    """

    _server: ClassVar[subprocess.Popen[bytes]]

    def __init__(self, folder: Path, process: int):
        self._folder, self._process = folder, process

    def run(self, code: str) -> None:
        """Run code in a new process, and check that it raises no exception and is not killed."""
        with self._connection() as connection:
            connection.send(code)
            try:
                error = connection.recv()
            except EOFError:
                error = "the process was killed"
        assert not error, error

    def _connection(self) -> Connection:
        """Return a connection to the server, which is started if no worker has started it."""
        address, log = self._folder / "tracing", self._folder / "tracing.log"
        with FileLock(self._folder / "tracing.lock"):
            if not address.exists():
                # Measuring coverage would double the time, and traced code is not run line by line.
                environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
                command = [sys.executable, "-W", "ignore", __file__, address, str(self._process)]
                with log.open("w") as output:
                    # The class keeps the process, which other workers may still need when the object is freed.
                    TracingServer._server = subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                while not address.exists():
                    assert self._server.poll() is None, log.read_text()
                    time.sleep(0.05)
        return Client(str(address))


def _serve(address: str, process: int) -> None:
    """Run the code that each connection to `address` sends in a forked process, until another process ends."""
    import torch
    import torch._dynamo
    import torch.export

    import headwise as hw

    torch.set_num_threads(1)  # threads would not survive a fork
    torch.compile(hw.MultiHeadAttention(12, 6, mask=hw.causal()), fullgraph=True, backend="aot_eager")(
        torch.randn(2, 5, 12)
    )
    torch._dynamo.reset()
    gc.freeze()  # a collection in a forked process would traverse, and copy, all objects of the imported modules

    def end_with_the_other_process(*_: object) -> None:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            os._exit(0)

    signal.signal(signal.SIGALRM, end_with_the_other_process)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)  # of this process alone: forks do not inherit it
    with Listener(f"{address}.new") as listener:
        os.rename(f"{address}.new", address)  # no worker sees an address at which nothing listens
        while True:
            connection = listener.accept()
            if not os.fork():
                _run_and_exit(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _run_and_exit(connection: Connection) -> None:
    """Run the code that a connection sends, send the traceback of an exception or "", and end this process."""
    error = ""
    try:
        exec(connection.recv(), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    connection.send(error)
    os._exit(1 if error else 0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
