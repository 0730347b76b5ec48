#!/usr/bin/env bash
# quick.sh STEP: builds for one GPU by plain nvcc and make, while a kernel is being worked on. What counts in the end is
# `bazel test`; this is for the many runs before it.
#
#   build [MODULE...]   all kernels, and the modules (or those named), into python/astrai/extension/lib
#   run FILE.cu [ARGUMENT...]
#                       builds a test or tool that is a .cu file, and runs it
#   compile FILE.cu...  builds several of them, at the same time
#   python ARGUMENT...  python3 with the package of this checkout on its path: quick.sh python -m pytest tests/python/ops
#
# Environment:
#   ASTRAI_QUICK     where objects are kept (default: ~/astrai-quick)
#   ARCH             what to compile for (default: sm_90a)
#   FAMILIES         the folders of kernels/ that are built (default: all); those that a module or test needs
#   DEFINES          further options for every compiler, such as -DNAME
#   CUDA_PATH, CXX   the toolkit and the C++ compiler (default: /usr/local/cuda, g++)
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
out=${ASTRAI_QUICK:-$HOME/astrai-quick}/${ARCH:-sm_90a}
cuda=${CUDA_PATH:-/usr/local/cuda}
cxx=${CXX:-g++}
python=${PYTHON:-python3}
mkdir -p "$out"

# dlpack.h is part of torch, under another path than the one that is included.
find_headers() {
  local torch
  torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  mkdir -p "$out/include/dlpack"
  ln -sf "$torch/include/ATen/dlpack.h" "$out/include/dlpack/dlpack.h"
}

# Makefiles: an object for each source, and static libraries of them.
object_of() { echo "$out/$(tr / _ <<<"$1").o"; }

rule() { # SOURCE
  local object common="-std=c++17 -O3 -I$root -I$out/include -MMD -MP -MF $(object_of "$1").d ${DEFINES:-}"
  object=$(object_of "$1")
  if [[ $1 == *.cu ]]; then
    printf '%s: %s\n\t%s\n' "$object" "$1" \
      "@$cuda/bin/nvcc -ccbin $cxx -arch=${ARCH:-sm_90a} -lineinfo -Xcompiler -fPIC,-fvisibility=hidden $common -c $1 -o $object"
  else
    printf '%s: %s\n\t%s\n' "$object" "$1" \
      "@$cxx -fPIC -fvisibility=hidden -DASTRAI_CUDA_ARCHS=${ARCH:-sm_90a} $python_includes -isystem $cuda/include $common -c $1 -o $object"
  fi
  printf -- '-include %s.d\n' "$object"
}

library() { # NAME SOURCE...
  local name=$1 source
  shift
  for source in "$@"; do rule "$source"; done
  printf '%s: %s\n\t@rm -f $@ && ar rcs $@ $^\n' "$out/$name" "$(for source in "$@"; do object_of "$source"; done | paste -sd ' ')"
}

make_all() { make --no-print-directory -f "$out/rules" -j "$(nproc)" all; }

kernel_sources() { (cd kernels && find ${FAMILIES:-.} -name "*.cu" -o -name "*.cc") | sed "s,^\(\.\/\)\?,kernels/," | sort; }
# Of python/bindings, what is not a module itself.
binding_sources() { ls python/bindings/*.cc | grep -vE "/($(paste -sd '|' <<<"$modules")|binding_probe|probe_params)\.cc$"; }

modules=$("$python" -c 'import runpy; print("\n".join(runpy.run_path("python/bindings/modules.bzl")["MODULES"]))')
python_includes=$("$python" -m pybind11 --includes 2>/dev/null || true)
runtime="-L$cuda/lib64 -lcudart_static -ldl -lrt -lpthread"

build() { # MODULE...
  local suffix lib=python/astrai/extension/lib module targets=()
  find_headers
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  {
    for module in "$@"; do
      targets+=("$lib/$module$suffix")
      rule "python/bindings/$module.cc"
      printf '%s: %s %s %s\n\t@%s -shared -o $@ $^ %s\n' "$lib/$module$suffix" "$(object_of "python/bindings/$module.cc")" \
        "$out/libbindings.a" "$out/libkernels.a" "$cxx" \
        "$runtime -Wl,--exclude-libs,ALL -Wl,--version-script=python/bindings/exports.lds"
    done
    library libbindings.a $(binding_sources)
    library libkernels.a $(kernel_sources)
    printf 'all: %s\n' "${targets[*]}"
  } >"$out/rules"
  make_all
}

compile() { # FILE.cu...
  local source main targets=()
  {
    for source in "$@"; do
      rule "$source"
      targets+=("$out/$(basename "$source" .cu)")
      main=$(object_of tests/kernels/testing/testing_main.cc)
      if grep -q '^int main' "$source"; then main=; fi # a tool
      printf '%s: %s %s %s\n\t@%s -o $@ $^ %s\n' "$out/$(basename "$source" .cu)" "$(object_of "$source")" \
        "$main" "$out/libkernels.a" "$cxx" "$runtime"
    done
    rule tests/kernels/testing/testing_main.cc
    library libkernels.a $(kernel_sources)
    printf 'all: %s\n' "${targets[*]}"
  } >"$out/rules"
  make_all
}

step=${1:?a step: build, run, compile or python}
shift
case $step in
  build) build ${@:-$modules} ;;
  compile) compile "$@" ;;
  run)
    compile "$1"
    "$out/$(basename "$1" .cu)" "${@:2}"
    ;;
  python) PYTHONPATH=$root/python:$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$@" ;;
  *)
    sed -n '2,16s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
