"""`split_by_depth`: the tensors of a model in fragments of about equal size, made of whole blocks where that is possible."""

from collections.abc import Mapping

from ..distributed.workers import balance

#: A finer division is tried if the largest fragment exceeds the mean by more than this factor.
_TOLERANCE = 1.25


def split_by_depth(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Split tensors into fragments of about equal size.

    A fragment consists of whole blocks, the numbered modules of a model. If blocks are too few or too unequal, it
    consists of inner blocks, of layers or of single tensors. A tensor is never divided. The blocks are dealt out in
    turn, so that every fragment has blocks of all depths.

    Args:
        sizes: number of elements of each tensor by name, in the order of depth.
        fragments: their number.

    Returns:
        The names in each fragment, in the order of depth.

    >>> sizes = {"embed.weight": 4, "blocks.0.a": 2, "blocks.0.b": 2, "blocks.1.a": 4, "blocks.2.a": 4}
    >>> split_by_depth(sizes, 2)
    [['embed.weight', 'blocks.1.a'], ['blocks.0.a', 'blocks.0.b', 'blocks.2.a']]
    """
    if fragments > len(sizes):
        raise ValueError(
            f"LocalSteps: fragments={fragments}, but the model has only {len(sizes)} tensors to average; pass fewer"
        )
    share = max(sum(sizes.values()) / fragments, *sizes.values(), 1)
    split: list[list[str]] = []
    levels = max(sum(part.isdigit() for part in name.split(".")) for name in sizes)
    for level in range(1, levels + 3):
        units: dict[str, list[str]] = {}
        for name in sizes:
            unit = _unit(name, level) if level < levels + 2 else name
            units.setdefault(unit, []).append(name)
        if len(units) < fragments:
            continue
        costs = [max(sum(sizes[name] for name in names), 1) for names in units.values()]
        split = [[] for _ in range(fragments)]
        for names, owner in zip(units.values(), balance(costs, fragments), strict=True):
            split[owner] += names
        if max(sum(sizes[name] for name in names) for names in split) <= _TOLERANCE * share:
            break
    return split


def _unit(name: str, level: int) -> str:
    """Return the module that a tensor belongs to: down to its `level`-th number, or the layer itself."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[level - 1] + 1] if level <= len(numbers) else parts[:-1])
