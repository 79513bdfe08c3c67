#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# File lint: every source file has the SPDX line near its top and at most 500 lines. Usage: files.py [ROOT]
import os
import pathlib
import sys

SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".map"}
NAMES = {"CMakeLists.txt", "Makefile"}
FOLDERS_OF_SCRIPTS = {"scripts", ".ci"}
SPDX = "SPDX-License-Identifier: Apache-2.0 OR MIT"
MAX_LINES = 500


def sources(root):
    for folder, inner, names in os.walk(root):
        inner[:] = [d for d in inner if not d.startswith(("build", ".", "__")) or d == ".ci"]
        for path in (pathlib.Path(folder, n) for n in names):
            if path.suffix in SUFFIXES or path.name in NAMES or path.parent.name in FOLDERS_OF_SCRIPTS:
                yield path


root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
count, faults = 0, []
for path in sorted(sources(root)):
    lines = path.read_text().splitlines()
    count += 1
    if not any(SPDX in line for line in lines[:3]):
        faults.append(f"{path.relative_to(root)}: no line '{SPDX}' in its first three")
    if len(lines) > MAX_LINES:
        faults.append(f"{path.relative_to(root)}: {len(lines)} lines, at most {MAX_LINES} are allowed")
print("\n".join(faults + [f"file lint: {count} files, {len(faults)} faults"]))
sys.exit(1 if faults or count == 0 else 0)
