#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Symbol lint: the library never prints, exits or aborts, and the shared library exports topkey_* only.
# A shared library with the CUDA run-time library in it imports what that one uses: with its archive given, these names are
# let through in the .so, and the library's own objects, given too, must do without them.
# Usage: symbols.sh [--cudart libcudart_static.a] LIBRARY|OBJECT...   (libtopkey.a, libtopkey.so*, *.o)
set -uo pipefail
# C stdio on the standard streams, the ends of a process, failed assertions, and <iostream>. std::terminate is not in the list:
# compilers call it for noexcept.
forbidden='stdout|stderr|stdin|(v|f|vf|d|vd)?printf|__(v|f|vf)?printf_chk|f?puts|f?putc|putchar|_IO_putc|fwrite|perror|psignal'
forbidden+='|abort|exit|_exit|_Exit|quick_exit|__assert_fail|_ZSt21__glibcxx_assert_fail.*|_ZSt(3cin|4cout|4cerr|4clog)|_ZNSt8ios_base4Init.*|_ZN3hwy5Abort.*'
faults=0

report() {  # report TITLE LINES
  [ -z "$2" ] && return
  printf '%s:\n%s\n' "$1" "$2"
  faults=$((faults + 1))
}

inherited=""
if [ "${1:-}" = --cudart ]; then
  inherited=$(nm --undefined-only "$2" 2>/dev/null | awk '$1 == "U" { sub(/@.*/, "", $2); print $2 }' | grep -Ex "$forbidden" | sort -u)
  shift 2
fi
own=0 objects=0
for library in "$@"; do
  case $library in
    *.o) objects=$((objects + 1)) ;;
  esac
done
if [ -n "$inherited" ]; then
  [ $objects -gt 0 ] || { echo "symbols.sh: --cudart needs the library's objects"; exit 2; }
  # nvcc gives every device function a host twin that calls exit and that nothing can call.
  inherited+=$'\nexit'
fi

[ $# -gt 0 ] || { echo "symbols.sh: no library given"; exit 2; }
for library in "$@"; do
  case $library in
    *.a | *.o) options=() ;;
    *) options=(-D) ;;
  esac
  undefined=$(nm -A "${options[@]}" --undefined-only "$library" | sed -E 's/@.*//') || exit 2
  defined=$(nm "${options[@]}" --defined-only --extern-only "$library") || exit 2
  # Of host twins of device functions, see above.
  used=$(grep -E "[ :][Uwv] ($forbidden)$" <<<"$undefined" | grep -vE '\.cu\.o: +U exit$')
  if [ ${#options[@]} -gt 0 ] && [ -n "$inherited" ]; then
    used=$(grep -vE "[ :]U ($(paste -sd'|' <<<"$inherited"))$" <<<"$used")
  fi
  report "$library must not use" "$used"
  case $library in
    *.o)
      own=$((own + 1))
      continue
      ;;
  esac
  count=$(grep -cE ' T topkey_' <<<"$defined")
  [ "$count" -gt 0 ] || report "$library" "defines no topkey_* function: nothing to check"
  if [ ${#options[@]} -gt 0 ]; then
    report "$library must export topkey_* only" "$(grep -vE ' [TDRB] topkey_' <<<"$defined")"
  fi
  echo "symbol lint: $(basename "$library"): $count topkey_* functions"
done
[ $own -eq 0 ] || echo "symbol lint: $own objects; of the CUDA run-time library and nvcc's twins: $(paste -sd' ' <<<"$inherited")"
exit $((faults > 0))
