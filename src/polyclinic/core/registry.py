"""Registries of the names that a recipe may give; the class of a name is imported when it is first used."""

import ast
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from polyclinic.core.errors import RecipeError

T = TypeVar("T")
S = TypeVar("S")


class Description(NamedTuple):
    about: str
    options: list[str]


class Registry(MutableMapping[str, T]):
    """A mapping from names to classes, which are imported on access. Other installed packages may add entries.

    Args:
        package: The package that holds the built-in classes.
        builtin: For each name the place of its class below `package`, as "module:Class".
        group: The group of entry points by which another distribution adds its own, for instance
            `[project.entry-points."polyclinic.algorithms"]`; by default `package`.
    """

    def __init__(self, package: str, builtin: Mapping[str, str], group: str = "") -> None:
        self.package, self.group = package, group or package
        self._builtin = {name: f"{package}.{place}" for name, place in builtin.items()}
        self._loaded: dict[str, T] = {}

    @cached_property
    def _places(self) -> dict[str, str]:
        return self._builtin | {e.name: e.value for e in entry_points(group=self.group) if e.name not in self._builtin}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            module, _, attribute = self._places[name].partition(":")
            # a module that registers the name itself comes first
            self._loaded.setdefault(name, getattr(import_module(module), attribute))
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._loaded]))

    def __len__(self) -> int:
        return len(self._places.keys() | self._loaded.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._loaded

    def register(self, name: str) -> Callable[[S], S]:
        """Return a decorator that adds a class under `name`, which recipes may then give."""
        if name in self._builtin:
            raise RecipeError(f"{name!r} is already one of {self.package}; register yours under another name")

        def add(kind: S) -> S:
            self._loaded[name] = kind  # type: ignore[assignment]
            return kind

        return add

    def describe(self) -> dict[str, Description]:
        """Return the first paragraph and the options of every entry. Nothing is imported for it."""
        return {name: self._describe_entry(name) for name in self}

    def _describe_entry(self, name: str) -> Description:
        if name not in self._places:
            kind: Any = self._loaded[name]
            return Description(_first_paragraph(kind.__doc__), _option_names(kind.__annotations__))
        module, _, attribute = self._places[name].partition(":")
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            return Description("", [])
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        body = next((n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == attribute), [])
        hints = {ast.unparse(n.target): ast.unparse(n.annotation) for n in body if isinstance(n, ast.AnnAssign)}
        return Description(_first_paragraph(ast.get_docstring(tree)), _option_names(hints))


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").split("\n\n")[0].split())


def _option_names(annotations: Mapping[str, object]) -> list[str]:
    return [name for name, hint in annotations.items() if "ClassVar" not in str(hint)]
