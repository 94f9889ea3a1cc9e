"""The `rvllm` command as a process: Ctrl-C leaves no traceback, though it comes while modules are imported."""

import signal
import sys


def main() -> int:
    """Runs sys.argv; returns the exit status. Until the modules are there, SIGINT ends the process."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rvllm import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
