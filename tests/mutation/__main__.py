"""Do the tests see faults? `python -m tests.mutation [--fast] [NAME ...]` prints who turned red for which fault.

For each fault of `faults.py` the product is made faulty in this process and the tests named there are run. A fault
counts as seen when at least two tests turn red for reasons of their own (the same check in several runs counts once),
at least one of them judging by something else than the product itself: the oracle, or a number counted by hand. First
all those tests must be green without any fault. Exit status 0: all seen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.mutation.faults import FAULTS, Fault

TESTS = Path(__file__).parents[1]

SELF = frozenset({"pool", "slots", "attended", "written_once", "trace_is_the_tables", "hashed_pages_are_exact"})
"""Checks that compare parts of the product with each other; everything else has an outside judge."""


class Reds:
    """A pytest plugin: which tests failed, by the name of what they check.

    Red is a test that said no itself; an exception out of the engine is a crash, which no test need have noticed.
    """

    def __init__(self) -> None:
        self.green: set[str] = set()
        self.red: set[str] = set()
        self.crashed: set[str] = set()

    def pytest_exception_interact(self, node, call, report) -> None:
        raised_in = Path(str(call.excinfo.traceback[-1].path))
        said_no = report.when == "call" and TESTS in raised_in.parents
        (self.red if said_no else self.crashed).add(self.name_of(node.nodeid))

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.green.add(self.name_of(report.nodeid))

    @staticmethod
    def name_of(node_id: str) -> str:
        """`test_run[streaming-logits]` is named by its check, other tests by their function."""
        function, _, parameters = node_id.split("::")[-1].partition("[")
        return parameters.rstrip("]").split("-")[-1] if function == "test_run" else function


@contextlib.contextmanager
def injected(fault: Fault | None) -> Iterator[None]:
    """The product with the fault in it."""
    with contextlib.ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        if fault is not None:
            fault.inject(patch)
        yield


def run(fault: Fault | None, tests: tuple[tuple[str, str], ...]) -> tuple[Reds, str]:
    """The outcome of `tests` with the fault in, and what pytest printed."""
    reds, printed = Reds(), io.StringIO()
    with injected(fault), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for file, keywords in tests:
            pytest.main(
                ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", file, "-k", keywords],
                plugins=[reds],
            )
    return reds, printed.getvalue()


def verdict(reds: Reds) -> str | None:
    """Why the fault does not count as seen; None if it does."""
    if len(reds.red) < 2:
        return "fewer than two tests turned red"
    if not reds.red - SELF:
        return "only comparisons of the product with itself turned red"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="only the faults that the task names")
    parser.add_argument("--verbose", action="store_true", help="show what pytest printed")
    parser.add_argument("names", nargs="*", help="faults to inject (default: all)")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if fault.asked_for or not options.fast]
    if options.names:
        unknown = set(options.names) - {fault.name for fault in FAULTS}
        if unknown:
            parser.error(f"unknown faults {sorted(unknown)}; known: {[fault.name for fault in FAULTS]}")
        faults = [fault for fault in FAULTS if fault.name in options.names]

    tests = tuple(sorted({test for fault in faults for test in fault.tests}))
    reds, printed = run(None, tests)
    if reds.red or reds.crashed or not reds.green:
        print(printed)
        print(
            f"without any fault: red {sorted(reds.red)}, crashed {sorted(reds.crashed)}; nothing to learn from faults"
        )
        return 1
    print(f"without any fault: {len(reds.green)} kinds of test, all green", flush=True)
    unseen = 0
    width = max(len(fault.name) for fault in faults)
    for fault in faults:
        started = time.monotonic()
        reds, printed = run(fault, fault.tests)
        if options.verbose:
            print(printed)
        problem = verdict(reds)
        unseen += problem is not None
        outside, inside = sorted(reds.red - SELF), sorted(reds.red & SELF)
        line = f"{fault.name:{width}}  {'NOT SEEN' if problem else 'seen':8}  {time.monotonic() - started:4.0f} s  "
        line += f"oracle or hand: {', '.join(outside) or '-'}; product with itself: {', '.join(inside) or '-'}"
        if reds.crashed:
            line += f"; crashed: {', '.join(sorted(reds.crashed))}"
        print(line + (f"  ({problem})" if problem else ""), flush=True)
    print(f"{len(faults) - unseen} of {len(faults)} faults seen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
