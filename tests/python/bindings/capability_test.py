"""What a device must be, told before a launch."""

import binding_probe as probe
import pytest
import torch

WHEEL = "sm_80,sm_89,sm_90a,compute_80"


@pytest.mark.parametrize(
    ("archs", "covered", "not_covered"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (10, 0), (12, 0)]),
        ("sm_89", [(8, 9)], [(8, 0), (8, 6), (9, 0)]),
        ("sm_90a", [(9, 0)], [(8, 9), (10, 0), (12, 0)]),
        ("compute_80", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)], [(7, 0), (7, 5)]),
        ("compute_89", [(8, 9), (9, 0), (12, 0)], [(8, 0), (8, 6)]),
        ("compute_90a", [(9, 0)], [(10, 0), (12, 0)]),
        (WHEEL, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], [(7, 0), (7, 5)]),
    ],
)
def test_archs_cover(archs, covered, not_covered):
    for major, minor in covered:
        assert probe.archs_cover(archs, major, minor), (major, minor)
        probe.check_capability("attn_decode", archs, major, minor)
    for major, minor in not_covered:
        assert not probe.archs_cover(archs, major, minor), (major, minor)


def test_case_b01_error_names_the_device_and_the_built_archs():
    with pytest.raises(NotImplementedError) as caught:  # a RuntimeError
        probe.check_capability("attn_decode", "sm_80,sm_89,sm_90a", 12, 0)
    assert str(caught.value) == (
        "attn_decode: the device has compute capability 12.0, but this build has kernels for "
        "sm_80,sm_89,sm_90a only"
    )
    probe.check_capability("attn_decode", WHEEL, 12, 0)  # through its PTX


def test_build_info():
    info = probe.build_info()
    assert info["name"] == "binding_probe"
    assert info["archs"] and all(a.startswith(("sm_", "compute_")) for a in info["archs"])
    assert info["cuda"].startswith("13.")


def test_reason_where_there_is_no_device():
    reason = probe.why_no_device()
    if torch.cuda.is_available():
        assert reason == ""
    else:
        assert reason.endswith(".") and ("GPU" in reason or "driver" in reason)
