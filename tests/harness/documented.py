"""The messages in docs/TROUBLESHOOTING.md. A test that causes such a failure compares what was printed with them."""

import re
import textwrap

from programs import ROOT

PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
ENTRIES = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))  # heading -> text


def entry_of(symptom):
    """Return the heading of the one entry that has this piece of text."""
    (found,) = [heading for heading, text in ENTRIES.items() if symptom in " ".join(f"{heading} {text}".split())]
    return found


def message_of(symptom):
    """Return the lines of the message that has this piece of text; [] if it is a failure without a message."""
    blocks = re.findall(r"(?:^ {4}.+\n)+", ENTRIES[entry_of(symptom)], re.MULTILINE)
    (block,) = [block for block in blocks if symptom in block] or [""]
    return textwrap.dedent(block).splitlines()


def agrees(message, text):
    """Return whether `text` contains every line of the message.

    "…" matches any text, and line breaks and several spaces count as a space.
    """
    spaced, *lines = (" ".join(each.split()) for each in (text, *message))
    return all(re.search(".*?".join(map(re.escape, line.split("…"))), spaced) for line in lines)


def assert_documented(text, symptom):
    """Assert that `text` has the message in which this piece stands. test_troubleshooting.py looks for such calls."""
    message = message_of(symptom)
    assert message and agrees(message, text), (message, text)
