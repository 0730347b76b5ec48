"""Makes the wheel: the same bytes from the same files, tagged with the platform it really needs.

The tag is not chosen but found: auditwheel reads which versioned symbols of the C and C++ runtimes
the modules use, and names the oldest manylinux policy that has them all. A wheel with machine code
is never tagged "any".
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import pathlib
import subprocess
import sys
import zipfile

# The earliest time that a zip can hold; any fixed one would do.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def metadata(args: argparse.Namespace) -> bytes:
    """The METADATA file."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {args.name}",
        f"Version: {args.version}",
        f"Summary: {args.summary}",
        f"Requires-Python: =={args.python}.*",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Classifier: Environment :: GPU :: NVIDIA CUDA",
        "Classifier: Operating System :: POSIX :: Linux",
        f"Classifier: Programming Language :: Python :: {args.python}",
    ]
    lines += [f"Requires-Dist: {requirement}" for requirement in args.requires]
    extras: dict[str, list[str]] = {}
    for item in args.extra:
        extra, _, requirement = item.partition("=")
        extras.setdefault(extra, []).append(requirement)
    for extra, requirements in sorted(extras.items()):
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {item} ; extra == "{extra}"' for item in requirements]
    text = "\n".join(lines) + "\n"
    if args.readme:
        text += "Description-Content-Type: text/markdown\n\n"
        text += pathlib.Path(args.readme).read_text(encoding="utf-8")
    return text.encode()


def write(path: pathlib.Path, members: dict[str, bytes], info: str, tag: str) -> None:
    """Writes the wheel with its WHEEL and RECORD files."""
    wheel = f"Wheel-Version: 1.0\nGenerator: astrai-wheel\nRoot-Is-Purelib: false\nTag: {tag}\n"
    members = {**members, f"{info}/WHEEL": wheel.encode()}
    record = []
    for name, data in sorted(members.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{info}/RECORD,,\n")
    # RECORD comes last, as installers like it.
    ordered = [*sorted(members.items()), (f"{info}/RECORD", "".join(record).encode())]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in ordered:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix: the mode below is honoured
            entry.external_attr = (0o100755 if ".so" in name else 0o100644) << 16
            archive.writestr(entry, data)


def platform_tag(wheel: pathlib.Path) -> str:
    """The platform that auditwheel finds for a wheel."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"auditwheel cannot read {wheel.name}:\n{result.stdout}{result.stderr}")
    answer = json.loads(result.stdout)
    if answer.get("pure") or not answer["overall_tag"].endswith("_x86_64"):
        sys.exit(f"{wheel.name} has no platform: {answer}")
    return answer["overall_tag"]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("--out", required=True, help="folder for the wheel")
    parser.add_argument("--name", required=True)
    parser.add_argument("--version-from", required=True, help="Python file with __version__ = ...")
    parser.add_argument("--summary", required=True)
    parser.add_argument("--python", required=True, help="MAJOR.MINOR")
    parser.add_argument("--license", required=True)
    parser.add_argument("--readme", default="")
    parser.add_argument("--requires", action="append", default=[])
    parser.add_argument("--extra", action="append", default=[], help="EXTRA=REQUIREMENT")
    parser.add_argument("--file", action="append", default=[], help="NAME-IN-WHEEL=PATH")
    args = parser.parse_args()

    for line in pathlib.Path(args.version_from).read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__ = "):
            args.version = line.split('"')[1]
    members = {}
    for item in args.file:
        name, _, path = item.partition("=")
        members[name] = pathlib.Path(path).read_bytes()
    if not any(data.startswith(b"\x7fELF") for data in members.values()):
        sys.exit("there is no extension module to put into the wheel")
    info = f"{args.name}-{args.version}.dist-info"
    members[f"{info}/METADATA"] = metadata(args)
    members[f"{info}/licenses/LICENSE"] = pathlib.Path(args.license).read_bytes()

    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    python = "cp" + args.python.replace(".", "")
    base = f"{args.name}-{args.version}-{python}-{python}"
    untagged = out / f"{base}-linux_x86_64.whl"
    write(untagged, members, info, f"{python}-{python}-linux_x86_64")
    platform = platform_tag(untagged)
    untagged.unlink()
    write(out / f"{base}-{platform}.whl", members, info, f"{python}-{python}-{platform}")


if __name__ == "__main__":
    main()
