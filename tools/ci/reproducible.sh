#!/usr/bin/env bash
# reproducible.sh [JUNIT-FILE]: the wheel and its modules from two checkouts in different places are the same, bit by bit.
#
# The first is this checkout, as it is built already or is built now; the second is a copy of it below the cache folder,
# with an output root of its own and no cache that the two share.
set -euo pipefail
cd "$(dirname "$0")/../.."
junit=${1:-}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/astrai
copy=$cache/reproducible/another/place/for/the/checkout
output=$cache/reproducible/output

finish() { # MESSAGE, empty if all is well
  echo "reproducible: ${1:-ok}"
  if [[ -n $junit ]]; then
    {
      echo '<testsuite name="reproducible"><testcase classname="reproducible" name="wheel_from_two_checkouts">'
      [[ -z $1 ]] || echo "<failure message=\"$1\"/>"
      echo '</testcase></testsuite>'
    } >"$junit"
  fi
  [[ -z $1 ]]
}

rm -rf "$cache/reproducible/another"
mkdir -p "$copy"
git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents -t "$copy" 2>/dev/null || true

./bazelw build --noshow_progress //python:astrai_wheel
first=$(sha256sum bazel-bin/python/dist/*.whl | sed 's, .*/, ,')
(cd "$copy" && ./bazelw --output_user_root="$output" build --noshow_progress //python:astrai_wheel)
second=$(cd "$copy" && sha256sum bazel-bin/python/dist/*.whl | sed 's, .*/, ,')
(cd "$copy" && ./bazelw --output_user_root="$output" shutdown)

status=0
if [[ $first == "$second" ]]; then
  echo "reproducible: $first"
  finish "" || status=1
else
  finish "here $first, there $second" || status=1
fi
# Repositories are read-only in places.
chmod -R u+w "$cache/reproducible" && rm -rf "$cache/reproducible"
exit "$status"
