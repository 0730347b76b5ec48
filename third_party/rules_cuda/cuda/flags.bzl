"""Build settings of the CUDA rules."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load(":providers.bzl", "CudaArchsInfo", "parse_archs")

def _archs_impl(ctx):
    return CudaArchsInfo(arch_specs = parse_archs(ctx.build_setting_value))

cuda_archs_flag = rule(
    doc = "A setting that holds archs; its grammar is that of parse_archs.",
    implementation = _archs_impl,
    build_setting = config.string(flag = True),
)

def _strings_impl(ctx):
    return BuildSettingInfo(value = [value for value in ctx.build_setting_value if value])

repeatable_string_flag = rule(
    doc = "A setting that collects the values of a flag given several times.",
    implementation = _strings_impl,
    build_setting = config.string(flag = True, allow_multiple = True),
)
