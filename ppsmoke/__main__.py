"""`python -m ppsmoke`, and where the console scripts and the zipapp begin. Any Python 3 can read this file."""

import sys


def main() -> int:
    """Run the command line, or say why it cannot run here; the exit status."""
    if sys.platform == "win32":
        print("ppsmoke: Windows is not supported\n  hint: use WSL", file=sys.stderr)
        return 1
    if sys.version_info < (3, 10):  # noqa: UP036 - said here, before newer syntax is read
        print("ppsmoke: Python 3.10 or newer is needed, this is " + sys.version.split()[0], file=sys.stderr)
        return 1
    try:
        from ppsmoke.cli import main as run

        return run()
    except KeyboardInterrupt:  # before anything was started, or after everything has ended
        return 130


if __name__ == "__main__":
    sys.exit(main())
