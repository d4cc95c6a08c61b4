"""What holds for every test, whoever started the tests and how."""

import os
import signal
import sys

# Started in the background or under nohup, a process ignores these, and so would every child that a test then signals.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


def pytest_configure(config):
    """Keep compiled modules, in pytest's cache where the environment wants none in the tree.

    Tests start hundreds of interpreters; without them each would compile everything again, a third of all the time.
    """
    if sys.dont_write_bytecode and getattr(config, "cache", None) is not None:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        del os.environ["PYTHONDONTWRITEBYTECODE"]
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


def pytest_xdist_auto_num_workers(config):
    """As many test processes as cores, at least two; one more for the quick part, whose tests mostly wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(2, min(cores, 8)) + (config.option.markexpr == "not slow")
