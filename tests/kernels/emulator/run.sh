#!/usr/bin/env bash
# Builds a test that is a .cu file, and the kernels it tests, for the CPU, and runs it.
#
#   tests/kernels/emulator/run.sh [-o DIR] TEST.cu [SOURCE.cu SOURCE.cc ...] [-- ARGUMENTS]
#
# The sources are those of the kernels' folder (kernels/X for tests/kernels/X/*_test.cu), or the
# ones that are named. Objects are kept in DIR (/tmp/astrai-emulator) and built anew where a source
# or header has changed. CXX and CXXFLAGS are honoured.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=/tmp/astrai-emulator
if [[ ${1-} == -o ]]; then out=$2; shift 2; fi
sources=()
while [[ $# -gt 0 && $1 != -- ]]; do sources+=("$(realpath "$1")"); shift; done
[[ ${1-} == -- ]] && shift
if [[ ${#sources[@]} -eq 0 ]]; then sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; fi
test=${sources[0]}
if [[ ${#sources[@]} -eq 1 ]]; then
  family=$(basename "$(dirname "$test")")
  for file in "$root/kernels/$family"/*.c[uc]; do [[ -e $file ]] && sources+=("$file"); done
fi
sources+=("$root/tests/kernels/testing/testing_main.cc" "$root"/tests/kernels/emulator/{block,fiber,grid,memory,ptx,runtime,shared}.cc)

flags=(-std=c++17 -g1 -DASTRAI_EMULATE -I"$root" -isystem "$root/tests/kernels/emulator/include"
       -Wall -Wextra -Wno-unused-parameter -Wno-unknown-pragmas -Wno-maybe-uninitialized ${CXXFLAGS--O1})
objects=()
makefile=$out/Makefile.$$
mkdir -p "$out"
trap 'rm -f "$makefile"' EXIT
{
  for source in "${sources[@]}"; do
    name=${source#"$root"/}
    object=$out/$(tr / _ <<<"${name#/}").o
    objects+=("$object")
    language=(); [[ $source == *.cu ]] && language=(-x c++ -D__CUDACC__ -include cuda_runtime.h)
    printf '%s: %s\n\t%s\n' "$object" "$source" "${CXX-g++} ${flags[*]} ${language[*]} -MMD -MP -c $source -o $object"
    printf -- '-include %s\n' "${object%.o}.d"
  done
} >"$makefile"
program=$out/$(basename "${test%.cu}")
make -s -j"${JOBS:-2}" -f "$makefile" "${objects[@]}"
${CXX-g++} "${objects[@]}" -o "$program" -pthread
"$program" "$@"
