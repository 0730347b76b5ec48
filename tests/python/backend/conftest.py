"""Tests of policy start without selections from the environment."""

import pytest

from astrai.extension.dispatch import selection


@pytest.fixture(autouse=True)
def clean_selection(monkeypatch):
    monkeypatch.delenv("ASTR_OPS", raising=False)
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    monkeypatch.setattr(selection, "_warned", set())
