#!/usr/bin/env bash
# run.sh STEP...: builds and tests this repository on a GPU machine that has no network.
#
#   keep   move the parts in .bundle/ (see pack.sh) to the store, outside the repository
#   setup  put the parts together: Bazel at its own path, the wheels into the store
#   test   bazel test //...            (implies setup)
#   ptx    the GPU tests once more with compute_80 PTX only: the sm_80 code paths, on whatever GPU this is
#   no_mma the attention tests on the scalar kernels
#   bench  every benchmark but bench_engine
#   bench_attention, bench_rope_append, bench_engine, ...
#          one benchmark; its tables and JSON lines go into $OUT
#   peers  install FlashInfer and FlashAttention-4 for the benchmarks and for flash. FlashInfer compiles itself in the
#          background; a benchmark waits for it
#   flash  the tests of the attention backends with FlashAttention-4 on the path
#   plans  //tools/bench:attention_plans
#   demo   //tools:demo
#
# The machine brings the CUDA toolkit (CUDA_PATH, or /usr/local/cuda), python3 with its headers and torch 2.6 or newer,
# and a C++ compiler. What is worth keeping is written into $OUT, if that is set: logs, summaries, JSON lines.
#
# Environment:
#   ASTRAI_STORE    where parts and wheels are kept (default: ~/astrai-bundle)
#   ASTRAI_CC       the C compiler (default: /usr/bin/gcc; CC and PATH may name a trimmed one that cannot link)
#   ASTRAI_CXX      the C++ compiler, with which FlashInfer compiles itself (default: /usr/bin/g++)
#   TARGETS         what to test (default: //...)
#   BAZEL_OPTIONS   further options for every bazel command
#   BENCH_OPTIONS   further options for every benchmark, such as --quick, --only=decode or --part=1/2
set -euo pipefail
cd "$(dirname "$0")/../.."
store=${ASTRAI_STORE:-$HOME/astrai-bundle}
export CC=${ASTRAI_CC:-/usr/bin/gcc} CXX=${ASTRAI_CXX:-/usr/bin/g++}
peers_pid=

say() { printf 'gpu_runner: [%3ds] %s\n' "$SECONDS" "$*" >&2; }

keep() {
  if [[ ! -d .bundle ]]; then
    say "there is no .bundle/ here"
    exit 1
  fi
  mkdir -p "$store/parts"
  (cd .bundle && sha256sum --quiet -c ./*.sha256)
  mv .bundle/* "$store/parts/"
  rm -r .bundle
  say "kept: $(ls "$store/parts" | paste -sd ' ')"
}

setup() {
  prefix=$(<"$store/parts/bazel.prefix")
  if [[ ! -x $prefix/bin/bazel ]]; then
    say "unpacking Bazel into $prefix"
    cat "$store"/parts/bazel.tar.xz.* | tar -C / -xJf -
  fi
  if [[ ! -e $store/wheels ]]; then
    say "unpacking the wheels"
    cat "$store"/parts/wheels.tar.* | tar -C "$store" -xf -
  fi
  if [[ ! -e $store/wheels/.model ]] && compgen -G "$store/parts/model.tar.*" >/dev/null; then
    say "unpacking the model"
    cat "$store"/parts/model.tar.* | tar -C "$store" -xf -
    touch "$store/wheels/.model"
  fi
  if [[ -d $store/peers ]]; then
    use_peers
  fi
  options=(
    --config=offline --config=local_cuda --config=system_torch --config=gpu
    --repo_env=ASTRAI_WHEELHOUSE="$store/wheels" --repo_env=CC="$CC"
    --color=no --curses=no --show_progress_rate_limit=15
    --strategy=TestRunner=local # the GPU's devices are not part of a sandbox
    ${BAZEL_OPTIONS:-}
  )
  # Without the model's wheel its tests cannot be built.
  targets=(${TARGETS:-//...})
  if [[ -z ${TARGETS:-} && ! -e $store/wheels/.model ]]; then
    say "the model was not carried: leaving out what needs it"
    targets+=(-//tools/demo/... -//tools:demo -//tests/python/model/...)
  fi
}

use_peers() { export ASTRAI_PEERS=$store/peers FLASHINFER_WORKSPACE_BASE=$store/peers-cache; }

peers() {
  if [[ ! -e $store/peers ]]; then
    if ! compgen -G "$store/parts/peers.tar.*" >/dev/null; then
      say "the peers were not carried (pack.sh FOLDER PYTHON-VERSION peers)"
      return 1
    fi
    say "installing the peers"
    cat "$store"/parts/peers.tar.* | tar -C "$store" -xf -
    rm -rf "$store/peers.part"
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$store/peers.part" \
      "$store"/peer-wheels/*.whl
    mv "$store/peers.part" "$store/peers"
    rm -r "$store/peer-wheels"
  fi
  use_peers
  python3 -m tools.bench.peers >"${OUT:-$store}/peers.txt" 2>&1 &
  peers_pid=$!
}

# A benchmark's times would be those of a GPU that waits for a busy CPU.
await_peers() {
  if [[ -n $peers_pid ]]; then
    say "waiting for the peers to compile"
    wait "$peers_pid" || say "a peer does not compile: see peers.txt"
    peers_pid=
  fi
}

bazel() { "$prefix/bin/bazel" --output_user_root="$store/output" "$@"; }

# Logs of failed tests and a summary by case.
report() { # NAME EVENTS
  python3 tools/ci/summary.py "$2" | tee "${OUT:-$store}/$1-summary.txt" || true
  if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT/$1-logs"
    python3 tools/ci/summary.py --failed-logs "$OUT/$1-logs" "$2" >/dev/null || true
  fi
}

run_tests() { # NAME OPTION...
  local name=$1 status=0
  shift
  bazel test "${options[@]}" --keep_going --build_event_json_file="$store/$name-events.json" "$@" -- "${targets[@]}" ||
    status=$?
  report "$name" "$store/$name-events.json"
  return "$status"
}

bench() { # NAME
  local target=$1
  if [[ $1 == bench_engine && ! -e $store/wheels/.model ]]; then
    target=bench_engine_without_model
  fi
  await_peers
  say "//tools/bench:$target"
  bazel run "${options[@]}" "//tools/bench:$target" -- --json "${OUT:-$store}/$1.jsonl" ${BENCH_OPTIONS:-} 2>&1 |
    tee "${OUT:-$store}/$1.txt"
}

[[ $# -gt 0 ]] || set -- test
status=0
for step in "$@"; do
  [[ $step == keep || $step == peers ]] || setup
  case $step in
    keep) keep ;;
    setup) bazel --version ;;
    test) run_tests test || status=1 ;;
    ptx) run_tests ptx --config=ptx80 --test_tag_filters=gpu --build_tests_only || status=1 ;;
    no_mma)
      targets=(//tests/kernels/attention/...)
      run_tests no_mma --config=no_mma || status=1
      ;;
    bench)
      for name in bench_rotary bench_rope_append bench_attention bench_binding bench_fp8; do
        bench "$name" || status=1
      done
      ;;
    bench_*) bench "$step" || status=1 ;;
    peers) peers || status=1 ;;
    flash)
      targets=(//tests/python/backend/...)
      run_tests flash --test_env=PYTHONPATH="$store/peers:$store/peers/nvidia_cutlass_dsl/dsl_packages" || status=1
      ;;
    plans) bazel run "${options[@]}" //tools/bench:attention_plans 2>&1 | tee "${OUT:-$store}/plans.txt" || status=1 ;;
    demo) bazel run "${options[@]}" //tools:demo || status=1 ;;
    *)
      say "unknown step: $step"
      exit 2
      ;;
  esac
done
await_peers
exit "$status"
