"""The wheel: name and tags, metadata, contents, and what its modules ask of the system."""

from __future__ import annotations

import base64
import email
import email.message
import hashlib
import io
import re
import sysconfig

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from tests.build import wheel_file

MODULES = ["attn_decode", "attn_paged_decode", "attn_paged_prefill", "attn_prefill", "rotary_emb"]

# Libraries that every system of the wheel's platform has; the CUDA runtime is linked statically.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
}


def info_file(name: str) -> str:
    (found,) = [m for m in wheel_file.members() if m.endswith(f".dist-info/{name}")]
    return wheel_file.members()[found].decode()


def metadata() -> email.message.Message:
    return email.message_from_string(info_file("METADATA"))


def name_parts() -> tuple[str, str, str, str, str]:
    parts = wheel_file.path().name.removesuffix(".whl").split("-")
    assert len(parts) == 5
    return tuple(parts)


def elf(module: str) -> ELFFile:
    return ELFFile(io.BytesIO(wheel_file.modules()[module]))


def undefined_symbols(module: str) -> list[str]:
    table = elf(module).get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return [s.name for s in table.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name]


def test_name_and_version_agree_with_the_metadata() -> None:
    name, version, *_ = name_parts()
    assert (name, version) == (metadata()["Name"], metadata()["Version"])


def test_case_a11_a_wheel_with_machine_code_is_never_tagged_any() -> None:
    _, _, python, abi, platform = name_parts()
    tag = "cp" + sysconfig.get_config_var("py_version_nodot")
    assert (python, abi) == (tag, tag)
    assert re.fullmatch(r"(manylinux_2_\d+|linux)_x86_64", platform), platform
    wheel = email.message_from_string(info_file("WHEEL"))
    assert wheel["Root-Is-Purelib"] == "false"
    assert wheel.get_all("Tag") == [f"{python}-{abi}-{platform}"]


def test_case_a04_the_tag_is_the_glibc_that_the_modules_need() -> None:
    needed = (2, 5)
    for module in MODULES:
        for section in elf(module).iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, versions in section.iter_versions():
                    for version in versions:
                        match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version.name)
                        if match:
                            needed = max(needed, (int(match[1]), int(match[2])))
    platform = name_parts()[4]
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platform)
    assert match, platform
    tagged = (int(match[1]), int(match[2]))
    # The policies name a few glibc versions only: the tag may ask for more, never for less.
    print(f"needs glibc {needed[0]}.{needed[1]}, tagged {platform}")
    assert tagged >= needed


def test_requirements() -> None:
    requires = metadata().get_all("Requires-Dist")
    assert "torch>=2.6" in requires
    version = "{}.{}".format(*sysconfig.get_python_version().split("."))
    assert metadata()["Requires-Python"] == f"=={version}.*"
    for extra in ("flash", "model"):
        assert extra in metadata().get_all("Provides-Extra")
        assert any(f'extra == "{extra}"' in item for item in requires)


def test_every_module_lies_where_python_imports_it() -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    expected = {f"astrai/extension/lib/{module}{suffix}" for module in MODULES}
    found = {n for n, data in wheel_file.members().items() if data.startswith(b"\x7fELF")}
    assert found == expected


def test_contents_are_the_package_and_nothing_else() -> None:
    for name in wheel_file.members():
        assert re.match(r"astrai/.*\.(py|so)$|astrai-[^/]*\.dist-info/", name), name
        assert "test" not in name and "probe" not in name, name
    for package in ("astrai", "astrai/extension", "astrai/model", "astrai/inference"):
        assert f"{package}/__init__.py" in wheel_file.members()


def test_record_lists_every_file_with_its_hash() -> None:
    lines = info_file("RECORD").splitlines()
    recorded = dict(line.split(",", 1) for line in lines)
    assert set(recorded) == set(wheel_file.members())
    for name, data in wheel_file.members().items():
        if name.endswith("/RECORD"):
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert recorded[name] == f"sha256={digest},{len(data)}", name


def test_case_a10_size_is_under_60_mb() -> None:
    assert wheel_file.path().stat().st_size < 60e6


@pytest.mark.parametrize("module", MODULES)
def test_case_a01_no_symbol_of_torch(module: str) -> None:
    pattern = re.compile(r"c10|_ZN2at|_ZNK2at|_ZN5torch|_ZNK5torch|^aoti_|^THP|^torch_")
    assert not [name for name in undefined_symbols(module) if pattern.search(name)]


@pytest.mark.parametrize("module", MODULES)
def test_case_a07_only_system_libraries_are_asked_for(module: str) -> None:
    dynamic = elf(module).get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= SYSTEM_LIBRARIES
    assert not [t for t in dynamic.iter_tags() if t.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]


@pytest.mark.parametrize("module", MODULES)
def test_only_the_init_function_is_exported(module: str) -> None:
    table = elf(module).get_section_by_name(".dynsym")
    exported = {s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name}
    assert f"PyInit_{module}" in exported
    # A runtime that two modules (or torch) both carry must not be resolved across them.
    assert not [name for name in exported if name.startswith(("cuda", "cu", "__cuda"))]


@pytest.mark.parametrize("module", MODULES)
def test_no_debug_information_and_no_path_of_the_machine_that_built_it(module: str) -> None:
    assert elf(module).get_section_by_name(".debug_info") is None
    data = wheel_file.modules()[module]
    for trace in (b"/sandbox/", b"/execroot/", b"/root/", b"/home/"):
        assert trace not in data, trace
