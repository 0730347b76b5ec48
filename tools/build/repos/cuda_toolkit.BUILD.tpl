load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cuda//cuda:defs.bzl", "cuda_toolchain", "cuda_toolchain_config_nvcc", "cuda_toolkit_info")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "compiler_files",
    srcs = glob([
        "bin/**",
        "include/**",
        "nvvm/**",
    ]),
)

cuda_toolkit_info(
    name = "toolkit",
    bin2c = "bin/bin2c",
    cicc = "nvvm/bin/cicc",
    fatbinary = "bin/fatbinary",
    libdevice = "nvvm/libdevice/libdevice.10.bc",
    link_stub = "bin/crt/link.stub",
    nvlink = "bin/nvlink",
    path = "%{root}",
    ptxas = "bin/ptxas",
    version = "%{major}.%{minor}",
)

cuda_toolchain_config_nvcc(
    name = "nvcc_config",
    cuda_toolkit = ":toolkit",
    nvcc_version_major = %{major},
    nvcc_version_minor = %{minor},
    toolchain_identifier = "nvcc",
)

cuda_toolchain(
    name = "nvcc",
    compiler_files = ":compiler_files",
    compiler_label = ":bin/nvcc",
    toolchain_config = ":nvcc_config",
)

toolchain(
    name = "toolchain",
    exec_compatible_with = [
        "@platforms//cpu:x86_64",
        "@platforms//os:linux",
    ],
    target_compatible_with = [
        "@platforms//cpu:x86_64",
        "@platforms//os:linux",
    ],
    target_settings = [
        "@rules_cuda//cuda:compiler_is_nvcc",
        "@rules_cuda//cuda:is_enabled",
    ],
    toolchain = ":nvcc",
    toolchain_type = "@rules_cuda//cuda:toolchain_type",
)

cc_library(
    name = "cuda_headers",
    hdrs = glob(["include/**"]),
    includes = [
        "include",
        "include/cccl",
    ],
)

cc_library(
    name = "cuda_runtime_static",
    srcs = [
        "lib/libcudadevrt.a",
        "lib/libcudart_static.a",
    ],
    linkopts = [
        "-ldl",
        "-lpthread",
        "-lrt",
    ],
    deps = [":cuda_headers"],
)
