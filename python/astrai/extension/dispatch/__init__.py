"""Dispatch: the one mechanism by which every family of ops chooses its implementation.

A family (attention, rotary, ...) registers how its calls are described (``axes``), its
implementations (``ImplRecord``, each with the ``Spec`` of the calls it can take) and a fallback. A
call then resolves in this order, and the answer says what decided it:

1. ``explicit``: an argument of the call. Strict.
2. ``context``: ``op_backend`` (or a family's own context, such as ``attn_backend``). Strict.
3. ``env``: ``ASTR_OPS="family=name,..."``, then the family's own variable. Soft.
4. ``profile``: ``ASTR_OPS="profile=reference"``: every family takes its fallback. Soft.
5. ``chain``: the available, faithful implementations that match, by priority.
6. ``fallback``.

A strict choice that cannot take the call raises ``ExplicitSelectionError``; ``explain`` says why.
"""

from astrai.extension.dispatch.registry import (
    ExplicitSelectionError,
    Family,
    ImplRecord,
    Resolution,
    family_names,
    get_family,
    is_family,
    refresh_family,
    register_family,
    unregister_family,
)
from astrai.extension.dispatch.resolution import explain, explain_plan, resolve, resolve_plan
from astrai.extension.dispatch.selection import (
    env_choice,
    env_mode,
    env_selection,
    get_override,
    op_backend,
    pop_choices,
    push_choices,
    read_env,
    register_env_alias,
)
from astrai.extension.dispatch.spec import Spec, axis, tensor_axes

__all__ = [
    "ExplicitSelectionError",
    "Family",
    "ImplRecord",
    "Resolution",
    "Spec",
    "axis",
    "env_choice",
    "env_mode",
    "env_selection",
    "explain",
    "explain_plan",
    "family_names",
    "get_family",
    "get_override",
    "is_family",
    "op_backend",
    "pop_choices",
    "push_choices",
    "read_env",
    "refresh_family",
    "register_env_alias",
    "register_family",
    "resolve",
    "resolve_plan",
    "tensor_axes",
    "unregister_family",
]
