#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Include lint: who may include whom (the Boundaries table of docs/architecture.md). One row per module: the project files
# it may include, and the outside headers it may include, both as regular expressions on the whole path.
# Usage: includes.py [ROOT]
import pathlib
import re
import sys

STD = r"[a-z_0-9]+"  # a C++ header of the standard library: no slash, no extension
THREADS = "thread|mutex|future|atomic|barrier|latch|semaphore|stop_token|condition_variable|shared_mutex"
ORDER = "topkey_c topkey_shard_c version error types number format rows quantize cache pool score select search merge plan indexer shard backend topkey"
PUBLIC = r"include/topkey/.*"

MODULES = [  # first match wins
    (r"include/topkey/", PUBLIC, rf"{STD}|std(bool|def|int)\.h"),  # and only headers above it in ORDER, see below
    (r"src/ref/", rf"{PUBLIC}|src/backend_table\.h|src/ref/.*", rf"(?!{THREADS}){STD}"),
    (r"src/cpu/", rf"{PUBLIC}|src/backend_table\.h|src/cpu/.*", rf"{STD}|hwy/.*|omp\.h|immintrin\.h"),
    (r"src/cuda/device/", rf"{PUBLIC}|src/cuda/device/.*", rf"{STD}|(cuda|cub|cute)/.*|cuda.*|cooperative_groups.*"),
    (r"src/cuda/", rf"{PUBLIC}|src/(backend_table|memory)\.h|src/cuda/.*", rf"{STD}|(cuda|cub)/.*|cuda.*"),
    (r"src/shard/", rf"{PUBLIC}|src/(check|indexer|memory|shard)\.h|src/shard/.*", rf"{STD}|mpi\.h|nccl\.h|cuda_runtime_api\.h"),
    (r"src/platform\.cpp", rf"{PUBLIC}|src/[a-z_]+\.h", r".*"),  # the only POSIX calls
    (r"src/", rf"{PUBLIC}|src/[a-z_]+\.h", STD),
    (r"support/", rf"{PUBLIC}|support/.*", rf"{STD}|nlohmann/.*|cuda_runtime_api\.h"),
    (r"python/", rf"{PUBLIC}|support/.*|python/src/.*", rf"{STD}|nanobind/.*"),
    (r"tools/", rf"{PUBLIC}|support/.*|tools/.*|bench/gpu_suite\.h", r".*"),
    (r"(bench|fuzz|examples|tests)/", rf"{PUBLIC}|support/.*|OWN/.*", r".*"),
]


def problems(root):
    order = ORDER.split()
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".h", ".c", ".cpp", ".cu", ".cuh"}):
        name = path.relative_to(root).as_posix()
        if name.startswith(("build", ".")):
            continue
        row = next((m for m in MODULES if re.match(m[0], name)), None)
        if row is None:
            yield f"{name}: belongs to no module of the table"
            continue
        project = row[1].replace("OWN", name.split("/")[0])
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not found:
                continue
            where, target = f"{name}:{number}: ", found[2]
            bases = [path.parent] * (found[1] == '"') + [root / "include", root / "src", root]
            inside = next((b / target for b in bases if (b / target).is_file()), None)
            if inside is None:
                if not re.fullmatch(row[2], target):
                    yield where + f"must not include {target} (or no such file)"
                continue
            inner = inside.resolve().relative_to(root).as_posix()
            if not re.fullmatch(project, inner):
                yield where + f"must not include {inner}"
            elif name.startswith("include/") and order.index(inside.stem) >= order.index(path.stem):
                yield where + f"{inner} is not above it in the list of headers"
        yield None  # looked at one file


if __name__ == "__main__":
    results = list(problems(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
    faults = [r for r in results if r]
    print("\n".join(faults + [f"include lint: {results.count(None)} files, {len(faults)} faults"]))
    sys.exit(1 if faults or len(results) == len(faults) else 0)
