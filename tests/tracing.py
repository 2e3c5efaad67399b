"""Processes without the shape checks of the tests, in which torch.compile and torch.export can trace headwise.

Torch's compiler takes seconds for its imports and its first graph. A server therefore does both once, and forks a new
process for every piece of code. The pieces start from the same state, and cannot influence each other.
"""

import gc
import json
import os
import subprocess
import sys
import traceback


class TracingServer:
    """Server that runs Python code in new processes; a context manager that ends it."""

    def __enter__(self):
        # Measuring coverage would double the time, and traced code is not run line by line.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        self._server.communicate()  # closes the input, which ends the server

    def run(self, code: str) -> None:
        """Run code in a new process, and check that it raises no exception and is not killed."""
        self._server.stdin.write(json.dumps(code) + "\n")
        self._server.stdin.flush()
        error = json.loads(self._server.stdout.readline())
        assert not error, error


def _serve() -> None:
    """Run each line of the input, a JSON string of code, in a forked process, and print the error or "" as JSON."""
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
    for line in sys.stdin:
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            _run_and_exit(json.loads(line), sender)
        os.close(sender)
        with open(receiver, encoding="utf-8") as pipe:
            error = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps(error or (f"exit status {status}" if status else "")), flush=True)


def _run_and_exit(code: str, sender: int) -> None:
    """Run code, write the traceback of an exception to a pipe, and end this process."""
    os.dup2(2, 1)  # the output belongs to the server
    error = ""
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    with open(sender, "w", encoding="utf-8") as pipe:
        pipe.write(error)
    os._exit(1 if error else 0)


if __name__ == "__main__":
    _serve()
