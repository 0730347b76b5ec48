"""A rule that makes a wheel with extension modules."""

load("@host_python//:defs.bzl", "PYTHON", "PYTHON_VERSION")

def _in_wheel(file, strip_prefix):
    """NAME=PATH for wheel.py; generated files lie in the same tree as sources."""
    name = file.short_path
    if not name.startswith(strip_prefix):
        fail("{} is not in {}".format(name, strip_prefix))
    return "--file={}={}".format(name[len(strip_prefix):], file.path)

def _impl(ctx):
    out = ctx.actions.declare_directory("dist")
    strip_prefix = ctx.label.package + "/"
    readme = ctx.files.readme[0] if ctx.files.readme else None

    args = ctx.actions.args()
    args.use_param_file("@%s", use_always = True)
    args.set_param_file_format("multiline")
    args.add(out.path, format = "--out=%s")
    args.add(ctx.attr.distribution, format = "--name=%s")
    args.add(ctx.file.version_from, format = "--version-from=%s")
    args.add(ctx.attr.summary, format = "--summary=%s")
    args.add(PYTHON_VERSION, format = "--python=%s")
    args.add(ctx.file.license, format = "--license=%s")
    if readme:
        args.add(readme, format = "--readme=%s")
    args.add_all(ctx.attr.requires, format_each = "--requires=%s")
    for extra, requirements in ctx.attr.extras.items():
        args.add_all(requirements, format_each = "--extra={}=%s".format(extra))
    for file in ctx.files.srcs:
        args.add(_in_wheel(file, strip_prefix))

    audit = ctx.attr._audit.label.workspace_root + "/site-packages"
    ctx.actions.run(
        executable = PYTHON,
        arguments = [ctx.file._tool.path, args],
        inputs = ctx.files.srcs + [ctx.file._tool, ctx.file.license, ctx.file.version_from] +
                 ctx.files._audit + ([readme] if readme else []),
        outputs = [out],
        env = {
            "PATH": "/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": audit,
        },
        mnemonic = "Wheel",
        progress_message = "Making the wheel %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

wheel = rule(
    doc = """A wheel of Python files and extension modules, in a folder `dist`.

The folder is there because the file's name is known only when it is made: it holds the platform tag that the
modules turn out to have.""",
    implementation = _impl,
    attrs = {
        "distribution": attr.string(mandatory = True, doc = "Name of the distribution."),
        "extras": attr.string_list_dict(doc = "Requirements by extra."),
        "license": attr.label(mandatory = True, allow_single_file = True),
        "readme": attr.label(allow_files = True, doc = "The long description."),
        "requires": attr.string_list(doc = "Requirements."),
        "srcs": attr.label_list(allow_files = True, doc = "Files in or below this BUILD file's folder."),
        "summary": attr.string(mandatory = True),
        "version_from": attr.label(mandatory = True, allow_single_file = [".py"], doc = "File with __version__."),
        "_audit": attr.label(default = "@py_audit//:tree", allow_files = True),
        "_tool": attr.label(default = "//tools/build:wheel.py", allow_single_file = True),
    },
)
