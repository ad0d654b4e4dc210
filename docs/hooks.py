"""What mkdocs does to a page before it is rendered."""

import re

_NO_RUN = re.compile(r"^([ \t]*```)(python|pycon) no-run: (.+?)[ \t]*$", re.MULTILINE)


def on_page_markdown(markdown, **_):
    """A block that the tests do not run says so above it, with its reason."""
    return _NO_RUN.sub(r'\1\2 title="not run in the tests: \3"', markdown)
