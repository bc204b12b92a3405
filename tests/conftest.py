"""For all tests."""

import signal

# Where the tests run in the background, a shell has made them ignore Ctrl-C, and every job that they start with them.
signal.signal(signal.SIGINT, signal.default_int_handler)
