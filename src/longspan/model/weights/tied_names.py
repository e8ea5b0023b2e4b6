"""Names that mean one parameter, as of a head that is tied to the embedding."""

from torch import nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to the parameter's first name.

    >>> tied_names(load_model(preset="qwen3-tiny", vocab_size=64))
    {'lm_head.weight': 'model.embed_tokens.weight'}
    """
    first = dict[int, str]()  # names by the parameters' ids, filled as they come
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: first_name for name, first_name in names.items() if name != first_name}
