#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Ranks over MPI from Python, with the package that scripts/python_package installed for this build folder. Exit code 77,
# which ctest counts as skipped, where there is none. Usage: python.sh FOLDER RANKS SCENE
set -eu
if [ ! -e "$1/python-ready" ]; then
  echo "python: LEFT OUT: the package is not installed (scripts/python_package $1 says why)"
  exit 77
fi
cd "$(dirname "$0")/../.."
exec mpirun --allow-run-as-root --oversubscribe -np "$2" "${PYTHON:-.venv/bin/python}" tests/mpi/python_ranks.py "$3"
