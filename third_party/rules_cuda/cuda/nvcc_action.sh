#!/bin/bash
# nvcc_action.sh DEPFILE UNUSED CANDIDATES NVCC ARG...
#
# Compiles, then writes into UNUSED those headers of CANDIDATES (one a line) that the compilation did not read: Bazel
# does not run it again when one of them changes. nvcc's dependency file is the union over the passes of the host
# compiler and of every arch, so a header that only one arch includes is in it.
set -e
depfile=$1 unused=$2 candidates=$3
shift 3
"$@" -MD -MF "$depfile"
awk '
  # Paths in the dependency file may hold "./" and "x/../".
  function normal(path,   parts, n, i, kept, k, out) {
    n = split(path, parts, "/")
    for (i = 1; i <= n; i++) {
      if (parts[i] == "." || parts[i] == "") continue
      if (parts[i] == ".." && k > 0) k--
      else kept[++k] = parts[i]
    }
    out = kept[1]
    for (i = 2; i <= k; i++) out = out "/" kept[i]
    return out
  }
  FNR == NR {
    for (i = 1; i <= NF; i++) if ($i != "\\" && $i != ":") used[normal($i)] = 1
    next
  }
  !($0 in used)
' "$depfile" "$candidates" >"$unused"
