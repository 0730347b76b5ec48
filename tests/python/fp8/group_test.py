"""Two processes: amaxes are shared over a group; weights that FSDP gathers are cast each time."""

import torch

from astrai.extension.fp8 import (
    DelayedScaling,
    DynamicScaling,
    cache,
    fp8_autocast,
    fp8_load_state_dict,
    fp8_name_weights,
    fp8_opt_out,
    fp8_state,
    fp8_state_dict,
)
from tests.python.fp8.layers import mlp, randn
from tests.python.fp8.processes import in_two_processes

RECIPE = DelayedScaling(history_len=4)


def fields_of(model):
    """Steps and histories as lists, which need no shared memory to travel."""
    out = []
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            contents = fp8_state().rings(layer.weight, RECIPE)
            for side in ("forward", "gradient"):
                names = ("history", "step", "position", "nonfinite")
                out.append([contents[side][name].tolist() for name in names])
    return out


def trains_apart_or_together(rank):
    results = {}
    for shared in (False, True):
        group = torch.distributed.group.WORLD if shared else None
        model = mlp(16, 32, 8)
        for step in range(3):
            x = randn(8, 16, seed=step) * (1 + 3 * rank) * (1 + step)
            if step == 1 and rank == 1:
                x[0, 0] = float("nan")
            with fp8_autocast(recipe=RECIPE, fp8_group=group):
                out = model(x)
            out.nan_to_num().float().square().mean().backward()
        with fp8_autocast(recipe=RECIPE, fp8_group=group):
            pass
        results[shared] = fields_of(model)
    return results


def test_amaxes_are_the_largest_over_the_group():
    first, second = in_two_processes(trains_apart_or_together)
    assert first[True] == second[True]
    assert first[False] != second[False]
    history, _, position, nonfinite = first[True][0]
    amaxes = [(randn(8, 16, seed=step) * (4 * (1 + step))).abs().max().item() for step in (0, 2)]
    assert history[0] == [*amaxes, 0.0, 0.0]
    assert position[0] == 2 and nonfinite == [1, 0]  # one rank's NaN counts on both


def trains_sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made = []
    real = cache.cast

    def cast(state, weight, key, make):
        return real(state, weight, key, lambda: made.append(key[0]) or make())

    cache.cast = cast
    results = {}
    for recipe in (DynamicScaling(), RECIPE):
        plain, model = mlp(16, 32, 8), mlp(16, 32, 8)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.01, fused=False) for m in (plain, model)
        ]
        losses, casts = [], []
        for step in range(3):
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                made.clear()
                for batch in range(2):
                    x = randn(8, 16, seed=step * 2 + batch).requires_grad_()
                    with fp8_autocast(recipe=recipe, cache_weights=True):
                        out = m(x)
                    loss = out.float().square().mean()
                    loss.backward()
                    losses.append(loss.item())
                casts.append(len(made))
                optimizer.step()
                optimizer.zero_grad()
        results[type(recipe).__name__] = (losses, casts)
    return results


def shares_the_state_of_sharded_parameters(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp(16, 32, 8)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fp8_name_weights(model)
    fp8_opt_out(model, "2.*")
    names = []

    def note(name, m, n, k):
        names.append(name)
        return True

    for step in range(2):
        with fp8_autocast(recipe=RECIPE, filter=note):
            out = model(randn(8, 16, seed=step))
        out.float().square().mean().backward()
    saved = fp8_state_dict(model)
    fp8_state().reset(model)
    fp8_load_state_dict(model, saved)
    entry = fp8_state_dict(model)["weights"]["0.weight"][0]["rings"]["forward"]
    return names, list(saved["weights"]), entry["position"].tolist()


def test_names_opt_outs_and_rings_are_those_of_the_sharded_parameters():
    for result in in_two_processes(shares_the_state_of_sharded_parameters):
        assert result == (["0.weight"] * 2, ["0.weight"], [2, 2])


def test_weights_that_fsdp_gathers_are_cast_each_time():
    for results in in_two_processes(trains_sharded):
        for name, (losses, casts) in results.items():
            # 2 layers, forward and backward: once a step, or once for each of its 2 micro-batches.
            assert casts == [4, 8] * 3, name
            for step in range(3):
                plain, sharded = (
                    losses[4 * step : 4 * step + 2],
                    losses[4 * step + 2 : 4 * step + 4],
                )
                for a, b in zip(plain, sharded, strict=True):
                    assert abs(a - b) <= 0.02 * abs(a), (name, step, losses)
