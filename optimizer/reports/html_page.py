"""A page that a browser opens without a network: one HTML document with its style inside."""

from __future__ import annotations

from html import escape

FONT = "'DejaVu Sans', Verdana, Arial, sans-serif"


def html_page(title: str, style: str, body: str, script: str = "") -> str:
    """The document; `body` is HTML, the title text, `script` what the body's own scripts need."""
    head = f"\n<script>{script}</script>" if script else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>
body {{ font-family: {FONT}; margin: 1.5em; color: #222; }}
.picture svg {{ max-width: 100%; height: auto; }}
{style}</style>{head}
</head>
<body>
{body}
</body>
</html>
"""
