#!/bin/bash
# Stands for cudafe++ and cicc (TOOL.real beside it) and makes what they write independent of where the checkout lies:
# nvcc hands them the source's real, absolute path, and the module id that all internal symbols carry is a hash of it.
# The path as it stood on nvcc's command line takes its place.
args=("$@") name=
for ((i = 0; i < $#; i++)); do
  if [[ ${args[i]} == --orig_src_file_name ]]; then
    name=${args[i + 1]}
  fi
done
for ((i = 0; i < $#; i++)); do
  if [[ ${args[i]} == --orig_src_path_name && $name != /* ]]; then
    args[i + 1]=$name
  fi
done
exec "$0.real" "${args[@]}"
