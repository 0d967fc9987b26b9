"""A list of named checks against a running server, and the loop that runs them.

A test framework was the obvious alternative; these scripts also serve as examples of clients and are run against
servers that somebody else started, so they need no more than this.
"""

import faulthandler
import sys
import time
import traceback

# A check that hangs is a failure too: print where, and end.
HANG_LIMIT_S = 600


class Checks:
    """Collects checks with the decorator and runs them in the order in which they were written."""

    def __init__(self):
        self._checks = []

    def __call__(self, check):
        self._checks.append(check)
        return check

    def run(self, *args):
        """Runs every check, prints what happened, and gives the exit code."""
        faulthandler.dump_traceback_later(HANG_LIMIT_S, exit=True)
        failed = 0
        for check in self._checks:
            began = time.monotonic()
            try:
                check(*args)
                word = "ok"
            except Exception:  # whatever it is, the other checks go on
                failed += 1
                word = "FAILED"
                traceback.print_exc()
            print(f"{check.__name__} ... {word} ({time.monotonic() - began:.1f} s)", flush=True)
        faulthandler.cancel_dump_traceback_later()
        print(f"{len(self._checks) - failed} passed, {failed} failed")
        return 1 if failed or not self._checks else 0


def equal(got, wanted, what):
    """Both values, when they differ."""
    assert got == wanted, f"{what}: got {got!r}, wanted {wanted!r}"


def refused(error_type, call, *args, **kwargs):
    """Calls what must raise, and gives what it raised."""
    try:
        result = call(*args, **kwargs)
    except error_type as error:
        return error
    raise AssertionError(f"no {error_type.__name__} but {result!r:.300}")


def main(checks, *args):
    sys.exit(checks.run(*args))
