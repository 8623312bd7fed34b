"""The nightly: suites of headless labs, their baselines, and the reports."""

import sys

# nbformat imports jsonschema, which imports rfc3987_syntax if it is installed: a parser of internationalized URLs that
# takes 2 s of CPU to import. No schema of a notebook needs it, so it is hidden: Python imports no module that is None.
if "rfc3987_syntax" not in sys.modules:
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    try:
        import nbformat  # noqa: F401
    finally:
        del sys.modules["rfc3987_syntax"]
