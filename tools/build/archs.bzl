"""Arch sets for cuda_library(archs = ...), per kind of source file.

The grammar is rules_cuda's: "compute_80:compute_80,sm_80" is one pass of the front end for compute_80 that leaves PTX
(compute_80) and machine code (sm_80) in the object.

sm_90a stands in a set of its own kind: code for compute_90a runs on sm_90 alone and nothing later, and what uses
wgmma, TMA or setmaxnreg does not compile for anything else (cases.md, B2).
"""

_SM80 = "compute_80:sm_80"
_SM89 = "compute_89:sm_89"
_SM90A = "compute_90a:sm_90a"
_PTX80 = "compute_80:compute_80"
_PTX89 = "compute_89:compute_89"

# Files that run everywhere: machine code for each level, and compute_80 PTX for whatever is newer.
PORTABLE_ARCHS = select({
    "//tools/build:sm80": [_SM80],
    "//tools/build:sm89": [_SM89],
    "//tools/build:sm90a": [_SM90A],
    "//tools/build:ptx80": [_PTX80],
    "//tools/build:ptx89": [_PTX89],
    "//conditions:default": ["compute_80:compute_80,sm_80", _SM89, _SM90A],
})

# Files that use fp8 mma.sync (sm_89 and later): the PTX has to be compute_89, and sm_80 has no code.
FP8_ARCHS = select({
    "//tools/build:sm80": [_SM80],
    "//tools/build:sm89": [_SM89],
    "//tools/build:sm90a": [_SM90A],
    "//tools/build:ptx80": [_PTX80],
    "//tools/build:ptx89": [_PTX89],
    "//conditions:default": ["compute_89:compute_89,sm_89", _SM90A],
})

# Files that use wgmma, TMA or setmaxnreg. In builds for another level their callers leave them out (HOPPER_DEFINES).
HOPPER_ARCHS = [_SM90A]

# For the sources that choose between levels: whether the Hopper files are linked in.
HOPPER_DEFINES = select({
    "//tools/build:sm80": [],
    "//tools/build:sm89": [],
    "//tools/build:ptx80": [],
    "//tools/build:ptx89": [],
    "//conditions:default": ["ASTRAI_HAS_SM90A=1"],
})
