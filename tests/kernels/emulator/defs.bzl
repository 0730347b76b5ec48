"""CUDA tests as CPU tests: see README.md."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

_COPTS = [
    "-x",
    "c++",
    "-D__CUDACC__",
    "-include",
    "cuda_runtime.h",
    "-Wno-unknown-pragmas",
    # Arrays that lanes fill in part are handed to warp operations by reference.
    "-Wno-maybe-uninitialized",
    # Kernels are large; the emulator itself is built with more.
    "-O1",
]

def _emulated_sources_impl(ctx):
    outputs = []
    for src in ctx.files.srcs:
        if src.extension not in ("cu", "cc"):
            continue
        output = ctx.actions.declare_file("{}/{}.cc".format(ctx.label.name, src.basename))
        ctx.actions.write(output, '#include "{}"\n'.format(src.short_path))
        outputs.append(output)
    return [DefaultInfo(files = depset(outputs))]

_emulated_sources = rule(
    doc = "A C++ file for each .cu or .cc file, which includes it: C++ rules do not take .cu files.",
    implementation = _emulated_sources_impl,
    attrs = {"srcs": attr.label_list(allow_files = True)},
)

def emulated_library(name, srcs, deps = [], **kwargs):
    """Kernels and their host code, compiled for the CPU.

    Args:
      name: of the library.
      srcs: files or filegroups with .cu, .cc and the headers that they include.
      deps: further libraries. None that brings CUDA's own headers.
      **kwargs: further attributes of cc_library.
    """
    _emulated_sources(
        name = name + "_sources",
        testonly = True,
        srcs = srcs,
    )
    cc_library(
        name = name,
        testonly = True,
        srcs = [":" + name + "_sources"],
        copts = _COPTS,
        linkstatic = True,
        alwayslink = True,
        textual_hdrs = srcs,
        deps = deps + ["//tests/kernels/emulator"],
        **kwargs
    )

def emulated_test(name, src, kernels = [], hdrs = [], filter = "", size = "small", **kwargs):
    """A .cu test on the CPU.

    Args:
      name: of the test.
      src: the .cu file.
      kernels: emulated_library targets; kernels/common is always there.
      hdrs: files or filegroups that the test includes.
      filter: text in the names of the cases that are small enough; all cases without one.
      size: of the test.
      **kwargs: further attributes of cc_test.
    """
    emulated_library(
        name = name + "_objects",
        srcs = [src] + hdrs + ["//tests/kernels/testing:device_headers"],
        deps = kernels + ["//tests/kernels/testing"],
    )
    cc_test(
        name = name,
        size = size,
        args = ["--filter=" + filter] if filter else [],
        linkstatic = True,
        deps = [":" + name + "_objects"],
        **kwargs
    )
