"""cuda_library and cuda_objects: compile with nvcc, archive and link as C++."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "ACTION_NAMES")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load(":providers.bzl", "CudaArchsInfo", "CudaInfo", "gencode", "parse_archs")
load(":toolchain.bzl", "find_cuda_toolchain", "use_cuda_toolchain")

_HDRS = [".cuh", ".h", ".hpp", ".hh", ".inl", ".inc"]
_SRCS = [".cu", ".cu.cc", ".cc", ".cpp", ".cxx"]

# As rules_cuda has them; nvcc optimises device code by default.
_MODE_FLAGS = {
    "dbg": ["-g"],
    "fastbuild": ["-Xcompiler=-g1"],
    "opt": ["-O2", "-DNDEBUG", "-Xcompiler=-g0", "-Xcompiler=-ffunction-sections", "-Xcompiler=-fdata-sections"],
}

def _has_extension(file, extensions):
    return any([file.basename.endswith(extension) for extension in extensions])

def _include_paths(ctx):
    """The `includes` of a target as paths from the execution root, for sources and for generated files."""
    package = [part for part in [ctx.label.workspace_root, ctx.label.package] if part]
    paths = ["/".join(package + ([] if path == "." else [path])) or "." for path in ctx.attr.includes]
    return paths + [ctx.bin_dir.path + "/" + path for path in paths]

def _common(ctx):
    """What every compilation and link of one target shares."""
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps + ctx.attr._runtime if CcInfo in dep]
    cuda_deps = [dep[CudaInfo] for dep in ctx.attr.deps if CudaInfo in dep]
    own = CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs + [src for src in ctx.files.srcs if _has_extension(src, _HDRS)]),
        includes = depset(_include_paths(ctx)),
        quote_includes = depset([".", ctx.bin_dir.path]),
        defines = depset(ctx.attr.host_defines),
    ))
    archs = parse_archs(";".join(ctx.attr.archs)) if getattr(ctx.attr, "archs", None) else None
    return struct(
        archs = gencode(archs if archs != None else ctx.attr._default_archs[CudaArchsInfo].arch_specs),
        cc_toolchain = cc_toolchain,
        compilation_context = cc_common.merge_cc_infos(direct_cc_infos = [own], cc_infos = deps).compilation_context,
        cuda = find_cuda_toolchain(ctx),
        defines = depset(ctx.attr.defines, transitive = [info.defines for info in cuda_deps]),
        features = features,
        host_compiler = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = ACTION_NAMES.cpp_compile,
        ),
        linking_contexts = [dep.linking_context for dep in deps],
        rdc_pic_objects = depset(transitive = [info.rdc_pic_objects for info in cuda_deps]),
    )

def _flags(ctx, common, rdc):
    attr = ctx.attr
    host = ["-fPIC"] + attr._host_copts[BuildSettingInfo].value + attr.host_copts
    return (
        ["-x", "cu", "-ccbin", common.host_compiler] +
        common.archs +
        (["-rdc=true"] if rdc else []) +
        _MODE_FLAGS[ctx.var["COMPILATION_MODE"]] +
        attr._copts[BuildSettingInfo].value +
        attr.copts +
        ["-Xcompiler=" + flag for flag in host] +
        ["-Xptxas=" + flag for flag in attr.ptxasopts] +
        ["-D" + define for define in attr.local_defines + attr.host_local_defines]
    )

def _compile(ctx, common, src, rdc):
    """Declares the compilation of one source; returns the object."""
    stem = "_objs/{}/{}{}".format(ctx.label.name, src.basename.rpartition(".")[0], ".rdc" if rdc else "")
    context = common.compilation_context
    obj = ctx.actions.declare_file(stem + ".pic.o")
    depfile = ctx.actions.declare_file(stem + ".d")
    unused = ctx.actions.declare_file(stem + ".unused")

    # What nvcc_action.sh chooses the unused headers from.
    candidates = ctx.actions.declare_file(stem + ".headers")
    listing = ctx.actions.args()
    listing.set_param_file_format("multiline")
    listing.add_all(context.headers)
    ctx.actions.write(candidates, listing)

    args = ctx.actions.args()
    args.add_all([depfile, unused, candidates])
    args.add(common.cuda.compiler_executable)
    args.add_all(_flags(ctx, common, rdc))
    args.add_all(depset(transitive = [context.defines, common.defines]), format_each = "-D%s")
    args.add_all(context.quote_includes, format_each = "-I%s")
    args.add_all(context.includes, format_each = "-I%s")
    args.add_all(context.system_includes, before_each = "-isystem")
    args.add_all(["-c", src, "-o", obj])
    ctx.actions.run(
        executable = ctx.executable._action,
        arguments = [args],
        inputs = depset(
            [src, candidates],
            transitive = [context.headers, common.cuda.all_files, common.cc_toolchain.all_files],
        ),
        outputs = [obj, depfile, unused],
        unused_inputs_list = unused,
        mnemonic = "CudaCompile",
        progress_message = "Compiling " + src.short_path,
        env = {"PATH": "/bin:/usr/bin"},
    )
    return obj

def _compile_all(ctx, common, rdc):
    return [_compile(ctx, common, src, rdc) for src in ctx.files.srcs if not _has_extension(src, _HDRS)]

def _device_link(ctx, common, objects):
    """Declares the link of relocatable device code; returns the object."""
    obj = ctx.actions.declare_file("_objs/{0}/{0}_dlink.pic.o".format(ctx.label.name))
    args = ctx.actions.args()
    args.add_all(["-dlink", "-ccbin", common.host_compiler])
    args.add_all(common.archs)
    args.add_all(["-Xcompiler=-fPIC"] + ctx.attr.linkopts)
    args.add_all(objects)
    args.add_all(["-o", obj])
    ctx.actions.run(
        executable = common.cuda.compiler_executable,
        arguments = [args],
        inputs = depset(transitive = [objects, common.cuda.all_files, common.cc_toolchain.all_files]),
        outputs = [obj],
        mnemonic = "CudaDeviceLink",
        env = {"PATH": "/bin:/usr/bin"},
    )
    return obj

def _cuda_objects_impl(ctx):
    common = _common(ctx)
    pic = depset(_compile_all(ctx, common, rdc = False))
    rdc_pic = depset(_compile_all(ctx, common, rdc = True), transitive = [common.rdc_pic_objects])
    return [
        DefaultInfo(files = rdc_pic),
        OutputGroupInfo(objects = pic, pic_objects = pic, rdc_objects = rdc_pic, rdc_pic_objects = rdc_pic),
        CcInfo(compilation_context = common.compilation_context),
        CudaInfo(
            defines = common.defines,
            objects = pic,
            pic_objects = pic,
            rdc_objects = rdc_pic,
            rdc_pic_objects = rdc_pic,
        ),
    ]

def _cuda_library_impl(ctx):
    common = _common(ctx)
    objects = depset(_compile_all(ctx, common, rdc = ctx.attr.rdc))
    if ctx.attr.rdc:
        objects = depset(transitive = [objects, common.rdc_pic_objects])
        objects = depset([_device_link(ctx, common, objects)], transitive = [objects])
    linking_context, outputs = cc_common.create_linking_context_from_compilation_outputs(
        name = ctx.label.name,
        actions = ctx.actions,
        feature_configuration = common.features,
        cc_toolchain = common.cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(pic_objects = objects),
        user_link_flags = ctx.attr.host_linkopts,
        linking_contexts = common.linking_contexts,
        alwayslink = ctx.attr.alwayslink,
        disallow_dynamic_library = True,
    )
    library = outputs.library_to_link
    archives = depset([library.pic_static_library] if library and library.pic_static_library else [])
    return [
        DefaultInfo(files = archives),
        OutputGroupInfo(lib = archives, objects = objects, pic_lib = archives, pic_objects = objects),
        CcInfo(compilation_context = common.compilation_context, linking_context = linking_context),
        CudaInfo(
            defines = common.defines,
            objects = depset(),
            pic_objects = depset(),
            rdc_objects = depset(),
            rdc_pic_objects = depset(),
        ),
    ]

_COMMON_ATTRS = {
    "copts": attr.string_list(doc = "Options of nvcc."),
    "defines": attr.string_list(doc = "Macros for this and for CUDA targets that depend on it."),
    "deps": attr.label_list(providers = [[CcInfo], [CudaInfo]]),
    "hdrs": attr.label_list(allow_files = _HDRS),
    "host_copts": attr.string_list(doc = "Options of the host compiler."),
    "host_defines": attr.string_list(doc = "Macros for this and for all targets that depend on it."),
    "host_local_defines": attr.string_list(doc = "Macros for this target alone."),
    "includes": attr.string_list(doc = "Include folders for this and for all targets that depend on it."),
    "local_defines": attr.string_list(doc = "Macros for this target alone."),
    "ptxasopts": attr.string_list(doc = "Options of ptxas."),
    "srcs": attr.label_list(allow_files = _SRCS + _HDRS),
    "_action": attr.label(
        default = "//cuda:nvcc_action.sh",
        allow_single_file = True,
        executable = True,
        cfg = "exec",
    ),
    "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    "_copts": attr.label(default = "//cuda:copts"),
    "_default_archs": attr.label(default = "//cuda:archs"),
    "_host_copts": attr.label(default = "//cuda:host_copts"),
    "_runtime": attr.label_list(default = ["//cuda:runtime"]),
}

cuda_objects = rule(
    doc = "Compiles to objects, with relocatable device code for a cuda_library(rdc = True) that depends on it.",
    implementation = _cuda_objects_impl,
    attrs = _COMMON_ATTRS,
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain() + use_cuda_toolchain(),
    provides = [CcInfo, CudaInfo],
)

cuda_library = rule(
    doc = "Compiles to a library for cc_* and cuda_* targets.",
    implementation = _cuda_library_impl,
    attrs = _COMMON_ATTRS | {
        "alwayslink": attr.bool(doc = "Link every object, also those that nothing refers to."),
        "archs": attr.string_list(doc = "Archs for this target instead of the flag's; see parse_archs."),
        "host_linkopts": attr.string_list(doc = "Options of the link of binaries that this is in."),
        "linkopts": attr.string_list(doc = "Options of the device link."),
        "rdc": attr.bool(doc = "Relocatable device code, linked here with that of the deps."),
    },
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain() + use_cuda_toolchain(),
    provides = [CcInfo, CudaInfo],
)
