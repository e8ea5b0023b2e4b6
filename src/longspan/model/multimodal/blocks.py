"""The blocks of an encoder: what is sharded, and recomputed, one at a time."""

from collections.abc import Iterator, Sequence

from torch import nn

from longspan.errors import ModelError


def encoder_blocks(module: nn.Module, blocks: Sequence[nn.Module] | None = None) -> dict[str, nn.Module]:
    """The blocks by qualified name, in the module's order: those given, or the modules of its longest lists.

    >>> [*encoder_blocks(CLIPVisionModel(config))][:2]
    ['encoder.layers.0', 'encoder.layers.1']

    Of lists inside lists the outer one counts. Empty where there is no list. Raises ModelError for blocks that are not
    inside the module, or inside each other.
    """
    names = {child: name for name, child in module.named_modules()}
    if blocks is None:
        lists = dict(_outer_lists(module, ""))
        longest = max((len(children._modules) for children in lists.values()), default=0)
        return {
            f"{name}.{i}": block
            for name, children in lists.items()
            if len(children._modules) == longest
            for i, block in children.named_children()
        }
    outside = [type(block).__name__ for block in blocks if block not in names or block is module]
    if outside:
        raise ModelError(
            f"blocks {', '.join(outside[:4])} are not modules inside {type(module).__name__}; give some of its own"
        )
    inside = {id(child): names[block] for block in blocks for child in block.modules() if child is not block}
    if nested := [f"{names[block]} in {inside[id(block)]}" for block in blocks if id(block) in inside]:
        raise ModelError(f"blocks lie inside each other ({', '.join(nested[:4])}); give the outer or the inner ones")
    order = {id(child): place for place, child in enumerate(names)}
    return {names[block]: block for block in sorted(set(blocks), key=lambda block: order[id(block)])}


def _outer_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Lists of modules that are in no other list, by qualified name."""
    for name, child in module.named_children():
        where = f"{path}.{name}".lstrip(".")
        if isinstance(child, nn.ModuleList) or _is_list_of_blocks(child):
            yield where, child
        else:
            yield from _outer_lists(child, where)


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a Sequential holds blocks of one class one after another, as timm's vision towers do."""
    children = [*module.children()]
    return (
        isinstance(module, nn.Sequential)
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.children()) for child in children)
    )
