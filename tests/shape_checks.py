"""Turn off the run-time checks of shapes, which take most of the time of small attention calls."""

import contextlib
import functools
import itertools

import jaxtyping


@contextlib.contextmanager
def shapes_unchecked():
    """Turn off the shape checks within the context."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def check_first_shapes(check, examples: int):
    """Return a check for hypothesis that turns off the shape checks after its first examples.

    After a failed shape check, the examples are counted anew, since hypothesis repeats those that fail.
    """
    counter = itertools.count()

    @functools.wraps(check)
    def run(*args, **kwargs):
        nonlocal counter
        with contextlib.nullcontext() if next(counter) < examples else shapes_unchecked():
            try:
                return check(*args, **kwargs)
            except jaxtyping.TypeCheckError:
                counter = itertools.count()
                raise

    return run
