#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Instruction set lint: in the static library only functions in a namespace N_<TARGET> of Highway use AVX and later
# instructions. A function outside of them may be called on any machine, or be the copy of an inline function that the linker
# keeps for all callers. Usage: isa.py LIBRARY
import re
import subprocess
import sys

TARGET = re.compile(r"\bN_[A-Z0-9_]+::")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
VECTOR = re.compile(r"^\s+[0-9a-f]+:\s+(v(?!err|erw|mcall|mlaunch)[a-z0-9]+|[a-z0-9]+\s.*%[yz]mm|k(mov|or|and)[a-z]+)\b")

dump = subprocess.run(["objdump", "-d", "-C", "--no-show-raw-insn", sys.argv[1]], capture_output=True, text=True, check=True).stdout
if "elf64-x86-64" not in dump:
    print("instruction set lint: not an x86-64 library, nothing checked")
    sys.exit(0)

object_file = function = ""
functions, vector_functions, faults = 0, 0, {}
for line in dump.splitlines():
    if found := re.match(r"^(\S+\.o):\s+file format", line):
        object_file = found[1]
    elif found := FUNCTION.match(line):
        function = found[1]
        functions += 1
        seen = False
    elif (found := VECTOR.match(line)) and not seen:
        seen = True  # one line a function is enough
        vector_functions += 1
        if not TARGET.search(function):
            faults[f"{object_file}: {function}"] = line.split(":", 1)[1].strip()
for where, what in faults.items():
    print(f"{where} uses: {what}")
print(f"instruction set lint: {functions} functions, {vector_functions} with vector instructions, {len(faults)} faults")
sys.exit(1 if faults or functions == 0 else 0)
