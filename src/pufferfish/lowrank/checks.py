"""Everything that can go wrong when a plan is applied, found before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import Tensor, nn

from ..layers import LowRank, Matrix, low_rank_type
from ..layers.base import CALL_HOOKS
from ..layers.names import named_modules, unwrap
from ..planning.candidates import unfit
from ..planning.plan import Plan
from ..planning.planner import check_values


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    if unwrap(model) is not model:
        raise ValueError(
            f"{verb}: this is a {type(model).__name__} around the model; apply it to the model inside, "
            "then wrap that"
        )
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(
                f"{verb}: {type(module).__name__} is compiled already; compile after this, not before"
            )


def belongs(model: nn.Module, plan: Plan) -> None:
    """Check that the plan is for this model: its layers are there, with their types and shapes."""
    layers = {name: module for name, _, module in named_modules(model)}
    for e in plan.entries:
        if e.matrix is None:
            continue
        module = layers.get(e.layer)
        if module is None:
            raise ValueError(f"{e.name}: the plan has this layer, the model does not")
        if type(module).__name__ != e.type:
            hint = "; it is low-rank already" if isinstance(module, LowRank) else ""
            raise ValueError(
                f"{e.name}: the plan is for a {e.type}, the model has a {type(module).__name__}{hint}"
            )
        kind = low_rank_type(type(module))
        if kind is None:
            raise ValueError(
                f"{e.name}: no low-rank form is registered for {e.type}; call pufferfish.register first"
            )
        if reason := unfit(module):
            raise ValueError(f"{e.name}: {reason}")
        now = {x.name: x for x in kind.matrices(module)}.get(e.matrix.name)
        if now != e.matrix:
            raise ValueError(f"{e.name}: the plan is for {_text(e.matrix)}, the model has {_text(now)}")


def fit(model: nn.Module, plan: Plan, finite: bool = False) -> None:
    """First pass: check everything that can fail, for all layers. Changes nothing and holds on to nothing."""
    belongs(model, plan)
    layers = {name: module for name, _, module in named_modules(model)}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: dict[str, list[str]] = {}
    for e in plan.entries:
        if e.matrix is None or (e.rank is None and e.rule is None):
            continue
        module = layers[e.layer]
        if finite and not (weight := module.get_parameter(e.matrix.weight)).is_meta:
            check_values(e.name, weight)
        if e.layer == "":
            raise ValueError("the model itself is the layer to replace; put it into an nn.Sequential")
        chosen.setdefault(e.layer, []).append(e.matrix.name)
    for layer, names in chosen.items():
        module = layers[layer]
        kind = low_rank_type(type(module))
        assert kind is not None
        gone, _ = replaced(kind.matrices(module), names, module)
        for name in gone:
            parameter = module.get_parameter(name)
            if uses[id(parameter)] > 1:
                raise ValueError(f"{layer}: its {name} is shared with another layer of this model")
            if type(parameter.data) is not Tensor:
                raise ValueError(
                    f"{layer}: its {name} is a {type(parameter.data).__name__}, not a plain tensor"
                )
        refuse_hooks(layer, module, gone)


def _text(matrix: Matrix | None) -> str:
    if matrix is None:
        return "no such weight"
    blocks = f" in {matrix.blocks} blocks" if matrix.blocks > 1 else ""
    return f"a weight of {'×'.join(map(str, matrix.shape))}{blocks} with{'out' * (not matrix.bias)} a bias"


def replaced(matrices: list[Matrix], names: Collection[str], dense: nn.Module) -> tuple[list[str], list[str]]:
    """The parameters, of the dense layer and of the low-rank one, that are no longer the same afterwards."""
    gone: tuple[list[str], list[str]] = ([], [])
    for x in matrices:
        pieces = [(x.weight, x.down), (x.weight, x.up)] if x.name in names else []
        for source, rows, target in x.moves(x.name in names):
            if (rows.start, rows.stop) != (0, len(dense.get_parameter(source))):
                pieces.append((source, target))
        for dense_name, low_rank_name in pieces:
            gone[0].append(dense_name)
            gone[1].append(low_rank_name)
    return gone


def refuse_hooks(name: str, module: nn.Module, gone: list[str]) -> None:
    """Hooks that see parameters or state dicts mean something else once the parameters are others."""
    for child in module.modules():
        for hooks, value in vars(child).items():
            if not ("_hooks" in hooks and value and hooks not in CALL_HOOKS):
                continue
            raise ValueError(
                f"{name}: it has hooks ({hooks.strip('_')}) that cannot be carried over; remove them"
            )
        if child is not module and any(getattr(child, hooks, None) for hooks in CALL_HOOKS):
            raise ValueError(f"{name}: there are hooks inside it that cannot be carried over; remove them")
    for label in gone:
        parameter = module.get_parameter(label)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name}.{label}: it has gradient hooks that cannot be carried over; remove them"
            )
