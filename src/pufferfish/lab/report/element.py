"""HTML elements as text."""

from html import escape


def element(tag: str, *inside: str, **attributes: object) -> str:
    """An HTML element. An underscore in a name becomes a hyphen, one at its end is dropped; None leaves an attribute out.

    >>> element("td", text("R&D"), class_="n", data_value=3.5, style=None)
    '<td class="n" data-value="3.5">R&amp;D</td>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(inside)}</{tag}>"


def text(value: str) -> str:
    """Escape text."""
    return escape(value, quote=False)
