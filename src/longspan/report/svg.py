"""Elements of SVG as text, which is escaped here."""

from html import escape


def svg_element(element: str, *content: str, **attributes: object) -> str:
    """Return one element. `content` is markup, plain words by `svg_text`; attribute values are escaped.

    >>> svg_element("rect", class_="bar", x=1.25, data_d=3, hidden=None)
    '<rect class="bar" x="1.2" data-d="3"></rect>'

    Underscores in names become hyphens, a trailing one is dropped; floats have one decimal; None is left out.
    """
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    written = (
        f' {name}="{value:.1f}"' if isinstance(value, float) else f' {name}="{escape(str(value), quote=True)}"'
        for name, value in named
    )
    return f"<{element}{''.join(written)}>{''.join(content)}</{element}>"


def svg_text(words: str, x: float, y: float, anchor: str, css_class: str = "label") -> str:
    """Return words in a drawing at (x, y), which is where they start, end or have their middle, as `anchor` says."""
    return svg_element("text", escape(words), class_=css_class, x=float(x), y=float(y), text_anchor=anchor)
