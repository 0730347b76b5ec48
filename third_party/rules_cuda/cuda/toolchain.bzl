"""The CUDA toolchain: which nvcc, and what it needs to run."""

load(":providers.bzl", "CudaToolchainConfigInfo", "CudaToolkitInfo")

CUDA_TOOLCHAIN_TYPE = Label("//cuda:toolchain_type")

def use_cuda_toolchain():
    """For the `toolchains` of a rule that calls find_cuda_toolchain."""
    return [CUDA_TOOLCHAIN_TYPE]

def find_cuda_toolchain(ctx):
    """The ToolchainInfo of the CUDA toolchain.

    Args:
      ctx: context of a rule with use_cuda_toolchain().

    Returns:
      ToolchainInfo with compiler_executable (path), all_files (depset), cuda_toolkit (Target).
    """
    return ctx.toolchains[CUDA_TOOLCHAIN_TYPE]

def _toolkit_impl(ctx):
    major, minor = ctx.attr.version.split(".")[:2]
    return CudaToolkitInfo(
        bin2c = ctx.file.bin2c,
        cicc = ctx.file.cicc,
        fatbinary = ctx.file.fatbinary,
        libdevice = ctx.file.libdevice,
        link_stub = ctx.file.link_stub,
        nvlink = ctx.file.nvlink,
        path = ctx.expand_location(ctx.attr.path, ctx.attr.path_data),
        ptxas = ctx.file.ptxas,
        version_major = int(major),
        version_minor = int(minor),
    )

cuda_toolkit_info = rule(
    doc = "Describes a CUDA toolkit.",
    implementation = _toolkit_impl,
    attrs = {
        "bin2c": attr.label(allow_single_file = True),
        "cicc": attr.label(allow_single_file = True),
        "fatbinary": attr.label(allow_single_file = True),
        "libdevice": attr.label(allow_single_file = True),
        "link_stub": attr.label(allow_single_file = True),
        "nvlink": attr.label(allow_single_file = True),
        "path": attr.string(mandatory = True, doc = "The toolkit's folder; $(location) is expanded."),
        "path_data": attr.label_list(doc = "What `path` refers to."),
        "ptxas": attr.label(allow_single_file = True),
        "version": attr.string(mandatory = True, doc = "MAJOR.MINOR"),
    },
    provides = [CudaToolkitInfo],
)

def _config_impl(ctx):
    return CudaToolchainConfigInfo(
        cuda_toolkit = ctx.attr.cuda_toolkit,
        toolchain_identifier = ctx.attr.toolchain_identifier,
    )

cuda_toolchain_config_nvcc = rule(
    doc = "Configures a toolchain for nvcc.",
    implementation = _config_impl,
    attrs = {
        "cuda_toolkit": attr.label(mandatory = True, providers = [CudaToolkitInfo]),
        "nvcc_version_major": attr.int(),
        "nvcc_version_minor": attr.int(),
        "toolchain_identifier": attr.string(mandatory = True, values = ["nvcc"]),
    },
    provides = [CudaToolchainConfigInfo],
)

def _toolchain_impl(ctx):
    config = ctx.attr.toolchain_config[CudaToolchainConfigInfo]
    if bool(ctx.attr.compiler_executable) == bool(ctx.attr.compiler_label):
        fail("exactly one of compiler_executable and compiler_label must be given")
    compiler = ctx.file.compiler_label
    return platform_common.ToolchainInfo(
        all_files = depset(
            [compiler] if compiler else [],
            transitive = [ctx.attr.compiler_files.files] if ctx.attr.compiler_files else [],
        ),
        compiler_executable = compiler.path if compiler else ctx.attr.compiler_executable,
        cuda_toolkit = config.cuda_toolkit,
        name = ctx.label.name,
        toolchain_identifier = config.toolchain_identifier,
    )

cuda_toolchain = rule(
    doc = "A CUDA toolchain, for toolchain().",
    implementation = _toolchain_impl,
    attrs = {
        "compiler_executable": attr.string(doc = "Path of the compiler."),
        "compiler_files": attr.label(allow_files = True, cfg = "exec", doc = "What the compiler reads."),
        "compiler_label": attr.label(allow_single_file = True, executable = True, cfg = "exec", doc = "The compiler."),
        "toolchain_config": attr.label(mandatory = True, providers = [CudaToolchainConfigInfo]),
    },
)
