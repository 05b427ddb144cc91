"""The one Jinja environment behind every generated file."""

from __future__ import annotations

import functools
import json
from typing import Any

import jinja2

from advisor.engines.imports import import_lines


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("advisor.engines"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  Python, JSON, shell and Markdown, no HTML
    )
    made.filters["py"] = repr_like_ruff
    made.filters["tojson"] = lambda value: json.dumps(value, indent=2)
    return made


def repr_like_ruff(value: object) -> str:
    """Python literal with double quotes, as the formatter writes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(repr_like_ruff(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def render(template: str, context: dict[str, Any]) -> str:
    """Fill a template of `advisor/engines/templates`; an undefined name is an error."""
    return _environment().get_template(template).render(context)


def render_python(template: str, context: dict[str, Any]) -> str:
    """The same for a Python file, whose `{{ imports }}` become what its code needs."""
    body = render(template, context | {"imports": ""})
    return render(template, context | {"imports": import_lines(body)})
