"""Writer of a page: the contents as JSON and compressed numbers, with the page's style and script, in one HTML file.

The page loads nothing. Its content security policy allows the one style and the one script that it contains, by their
hashes, and images inside the file.
"""

import hashlib
import json
import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path

from headwise.errors import require
from headwise.page.contents import Contents
from headwise.page.page_json import page_json

IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
"""Import statement of a module of the page's script."""

COMMENTS_AND_INDENTS = re.compile(r"^[ ]*/\*\*.*?\*/\n|^[ ]*//[^\n]*\n|^[ ]+|^\n", re.MULTILINE | re.DOTALL)
"""Comments on lines of their own, empty lines, and blanks at the start of lines."""

ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters of JSON that could end a script element or start a comment in it, and what they are replaced by."""

ENTRY = "main.js"
"""Module of the script that imports all others."""


def require_jinja() -> None:
    """Raise `MissingExtra` if jinja2, which is needed to write a page, is not installed."""
    require("jinja2", purpose="writing a page", extra="plot")


def write_page(contents: Contents, path: Path) -> None:
    """Write a page to `path`, as one HTML file that works offline.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    path.write_text(page_html(contents), encoding="utf-8", errors="replace")


def page_html(contents: Contents) -> str:
    """Return a page as HTML.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require_jinja()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("headwise", "page")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    style, script = (files("headwise.page") / "style.css").read_text("utf-8"), joined_script()
    values, arrays = page_json(contents)
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    script_hash, style_hash = (
        f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'" for text in (script, style)
    )
    policy = f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    page: str = environment.get_template("template.html.jinja").render(
        title=contents.title,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        contents=Markup(data.translate(ESCAPES)),
        blobs=list(arrays.items()),
    )
    return page


def joined_script() -> str:
    """Return all modules of the page's script as one, each after the modules that it imports.

    Import statements and the word `export` are removed: the names of all modules are different. Comments and
    indentation are removed, too; they are a fifth of the script.
    """
    sources: dict[str, str] = {}

    def add(name: str) -> None:
        if name in sources:
            return
        source = (files("headwise.page") / "script" / name).read_text("utf-8")
        for imported in IMPORT.findall(source):
            add(imported)
        sources[name] = re.sub(r"^export ", "", IMPORT.sub("", source), flags=re.MULTILINE).strip()

    add(ENTRY)
    return "\n" + re.sub(COMMENTS_AND_INDENTS, "", "\n".join(sources.values())) + "\n"
