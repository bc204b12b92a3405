"""The messages in docs/TROUBLESHOOTING.md. A test that causes such a failure compares what was printed with them."""

import re
import textwrap

from programs import ROOT

PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
SECTIONS = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| `([^`]+)` \| ([^\n]+) \|$", PAGE.partition("\n| message | ")[2], re.MULTILINE)
# Each entry's heading, or message of the table -> its text.
ENTRIES = dict(SECTIONS) | {message: f"\n    {message}\n\n{advice}" for message, advice in ROWS}
NOT_TESTED = {name for name, text in ENTRIES.items() if text.rstrip().endswith("*(not tested)*")}


def entry_of(symptom):
    """Return the name of the one entry that has this piece of text."""
    (found,) = [name for name, text in ENTRIES.items() if symptom in " ".join(f"{name} {text}".split())]
    return found


def message_of(symptom):
    """Return the lines of the message that has this piece of text; [] if it is a failure without a message."""
    blocks = re.findall(r"(?:^ {4}.+\n)+", ENTRIES[entry_of(symptom)], re.MULTILINE)
    (message,) = [block for block in map(textwrap.dedent, blocks) if symptom in block] or [""]
    return message.splitlines()


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
