#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Holds README.md against the tests beside it: every case has one row, every test it names exists in that file, every
# test of the suite is named in the row of its case, a case without tests says what it waits for. Usage: check_table.py
import pathlib
import re
import sys

CASES = """
B01 B03 B04 B06 B07 B09 B12 B14 B16 B18 B19 B21 B22 B24 B26 B27 B28 B29
B31 B32 B33 B35 B36 B38 B39 B40 B42 B43 B45 B46 B48 B50 B51 B53 B55 B56
""".split()
PIECES = {"cuda", "layer", "sharding", "python"}
HERE = pathlib.Path(__file__).resolve().parent


def tests_of(folder):
    """{(file, test)} of the suite."""
    return {
        (path.name, name)
        for path in sorted(folder.glob("*_test.cpp"))
        for name in re.findall(r"^TEST(?:_P)?\((?:Plan|Layer)?Cases, (\w+)\)", path.read_text(), re.M)
    }


def rows_of(text):
    """[case, kind, tests, waits] of each row of the table."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| B")]
    rows = [[cell.strip() for cell in cells] for cells in lines]
    return [row for row in rows if len(row) == 4]


def named_in(cell):
    """{(file, test)} of one cell: "a_test.cpp: `X`, `Y`<br>b_test.cpp: `Z`"."""
    parts = [part.partition(":") for part in cell.split("<br>")]
    return {(file.strip(), name) for file, _, names in parts for name in re.findall(r"`(\w+)`", names)}


def faults(rows, tests):
    cases = [row[0] for row in rows]
    for case in sorted(set(CASES) | set(cases)):
        if cases.count(case) != 1 or case not in CASES:
            yield f"{case}: {cases.count(case)} rows" + ("" if case in CASES else ", and it is no case")
    listed = set()
    for case, kind, cell, waits in rows:
        named = named_in(cell)
        listed |= named
        words = set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", waits)))
        if not kind:
            yield f"{case}: its kind is missing"
        for file, name in sorted(named):
            if (file, name) not in tests:
                yield f"{case}: {file} has no test {name}"
            if not name.startswith(case + "_"):
                yield f"{case}: {name} is another case's test"
        if not words <= PIECES:
            yield f"{case}: waits for {', '.join(sorted(words - PIECES))}, which is no piece"
        if not named and not words:
            yield f"{case}: neither tested nor waiting"
    for file, name in sorted(tests - listed):
        yield f"{file}: {name} is not in the table"


def main():
    rows, tests = rows_of((HERE / "README.md").read_text()), tests_of(HERE)
    found = list(faults(rows, tests))
    tested = sum(1 for row in rows if named_in(row[2]))
    waiting = sum(1 for row in rows if row[3] != "-")
    counts = f"{tested} tested by {len(tests)} tests, {waiting} with a part that waits, {len(found)} faults"
    print("\n".join([*found, f"cases: {len(rows)}, {counts}"]))
    sys.exit(1 if found or not tests else 0)


if __name__ == "__main__":
    main()
