"""The message of an error as one line of a report."""

from __future__ import annotations


def one_line(error: BaseException, max_letters: int = 200) -> str:
    """Returns the message of an error as one line of bounded length that any file may hold."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= max_letters else f"{text[:max_letters]}..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
