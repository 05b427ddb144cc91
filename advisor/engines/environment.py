"""The one Jinja environment behind every generated file."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jinja2

from advisor.engines.imports import import_lines

#: Words that YAML 1.1 doesn't read as text.
_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}


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
    made.filters["in_docstring"] = in_docstring
    made.filters["yaml_scalar"] = yaml_scalar
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


def in_docstring(text: str) -> str:
    """Text that stands between triple double quotes, such as a file's name: it reads there as it is."""
    return text.replace("\\", "\\\\").replace('"""', r"\"\"\"")


def yaml_scalar(value: object) -> str:
    """A scalar in YAML; text is quoted only where it would be read as something else."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.,/-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def render(template: str, context: dict[str, Any]) -> str:
    """Fill a template of `advisor/engines/templates`; an undefined name is an error."""
    return _environment().get_template(template).render(context)


def render_python(template: str, context: dict[str, Any]) -> str:
    """The same for a Python file, whose `{{ imports }}` become what its code needs."""
    body = render(template, context | {"imports": ""})
    return render(template, context | {"imports": import_lines(body)})
