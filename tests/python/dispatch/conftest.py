"""A small family of its own for each test, and an environment without selections."""

import pytest

from astrai.extension import dispatch
from astrai.extension.dispatch import selection


class Toy:
    """Family ``toy``: a call has a number ``n`` and a flag; records return their own name."""

    def __init__(self):
        self.loaded = {"wide": True, "small": True, "rough": True}
        self.extra = []
        self.provided = 0

    def records(self):
        self.provided += 1
        axis = dispatch.axis
        small = axis("n").in_(1, 2, 3, 4) & axis("flag").falsy()
        return [
            self.record("wide", axis("n").at_least(2), 20),
            self.record("small", small, 10),
            self.record("rough", dispatch.Spec.always(), 1, faithful=False),
            self.record("plain", dispatch.Spec.always(), 0),
            *self.extra,
        ]

    def record(self, name, spec, priority, faithful=True):
        def run():
            return name

        return dispatch.ImplRecord(
            "toy",
            name,
            run,
            spec,
            available=lambda: self.loaded.get(name, True),
            priority=priority,
            faithful=faithful,
        )


@pytest.fixture(autouse=True)
def clean_selection(monkeypatch):
    monkeypatch.delenv("ASTR_OPS", raising=False)
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    monkeypatch.setattr(selection, "_warned", set())


@pytest.fixture
def toy():
    family = Toy()
    dispatch.register_family(
        "toy", lambda n, flag=False: {"n": n, "flag": flag}, family.records, "plain"
    )
    yield family
    dispatch.unregister_family("toy")
