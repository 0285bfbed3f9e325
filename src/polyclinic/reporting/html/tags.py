"""HTML elements. Text that is not `Markup` is escaped: names of sites and classes come from files of strangers."""

from collections.abc import Iterable

from markupsafe import Markup, escape

VOID = ("img", "meta", "br")


def tag(name: str, /, *inside: str | Markup, **attributes: str | int | None) -> Markup:
    """Build an element. `class_` becomes class, `aria_label` aria-label; attributes that are None are left out."""
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    start = Markup("<{}{}>").format(name, join_markup(Markup(' {}="{}"').format(key, value) for key, value in given))
    return start if name in VOID else start + join_markup(inside) + Markup("</{}>").format(name)


def join_markup(parts: Iterable[str | Markup], between: str = "") -> Markup:
    return Markup(escape(between)).join(parts)
