"""For targets that need a GPU."""

load("@host_gpu//:defs.bzl", "HAS_GPU")

_NO_GPU = ["@platforms//:incompatible"]

# For `target_compatible_with`: without a GPU the target is reported as SKIPPED. The flag //tools/build:gpu overrides
# what was found on this machine.
REQUIRES_GPU = select({
    "//tools/build:gpu_on": [],
    "//tools/build:gpu_off": _NO_GPU,
    "//conditions:default": [] if HAS_GPU else _NO_GPU,
})

# For `tags`: takes a share of the GPU (see --local_resources in .bazelrc), and runs where the GPU is.
GPU_TAGS = [
    "gpu",
    "no-remote-exec",
    "resources:gpu:1",
]
