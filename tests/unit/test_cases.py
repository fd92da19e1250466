"""docs/cases.md: every case of the list has its row, and every test it names exists."""

from __future__ import annotations

import re

from tests.documents import ROOT, missing_tests, named_tests

TEXT = (ROOT / "docs" / "cases.md").read_text()
# The list of cases has gaps.
CASES = [5, 10, 12, 14, 16, 17, 18, 19, 21, *range(23, 67)]


def test_every_case_has_one_row_in_order():
    rows = re.findall(r"^\| C(\d\d) \| .+ \| .+ \|$", TEXT, re.MULTILINE)
    assert [int(number) for number in rows] == CASES


def test_every_test_named_exists():
    assert not missing_tests(TEXT)


def test_every_row_names_a_test():
    without = [row.split(" | ")[0] for row in TEXT.splitlines() if row.startswith("| C") and not named_tests(row)]
    assert without == []


def test_a_missing_one_would_be_seen():
    assert missing_tests("`tests/unit/test_cases.py::test_no_such`, `tests/no_such.py::test_a`") == [
        "tests/unit/test_cases.py::test_no_such",
        "tests/no_such.py::test_a",
    ]
    assert not missing_tests("`tests/unit/test_cases.py::test_every_test_named_exists`")
