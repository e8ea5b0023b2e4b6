"""One term of the source changed in this process, so that a test can show that it would be noticed."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import CodeType, FunctionType, ModuleType

Change = tuple[str, str, str]  # a module of longspan, what stands in it once, and what takes its place


@contextmanager
def mutated(change: Change | None) -> Iterator[None]:
    """The source has this change while the context is open; for None it stays as it is."""
    undo = mutate(*change) if change else []
    try:
        yield
    finally:
        restore(undo)


def each_mutated(changes: Mapping[str, Change]) -> Iterator[str]:
    for name, change in {"nothing": None, **changes}.items():
        with mutated(change):
            yield name


def mutate(name: str, old: str, new: str) -> list[tuple[FunctionType, CodeType]]:
    """Give the functions of a module the code that they would have with this change; returns what to put back.

    The module is not run again: what it registered stays as it is.
    """
    module = import_module(f"longspan.{name}")
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}: change the mutation with it"
    after = dict(_codes(compile(source.replace(old, new), f"{name} mutated", "exec")))
    undo = list[tuple[FunctionType, CodeType]]()
    for qualified, function in functions(module).items():
        if after[qualified] != function.__code__:
            undo.append((function, function.__code__))
            function.__code__ = after[qualified]
    assert undo, f"{name}: {old!r} -> {new!r} changes nothing"
    return undo


def restore(undo: list[tuple[FunctionType, CodeType]]) -> None:
    for function, code in undo:
        function.__code__ = code


def functions(module: ModuleType) -> dict[str, FunctionType]:
    by_name: dict[str, FunctionType] = {}
    for value in (inspect.unwrap(x) if callable(x) else x for x in vars(module).values()):
        inner = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for member in inner:
            for attribute in ("fget", "func", "__func__", "__wrapped__", "_torchdynamo_orig_callable"):
                member = getattr(member, attribute, None) or member
            if isinstance(member, FunctionType) and member.__code__.co_filename == module.__file__:
                by_name[member.__code__.co_qualname] = member
    return by_name


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
