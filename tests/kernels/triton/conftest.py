"""Triton reads TRITON_INTERPRET once, at import: the interpreted tests run in a process of their own.

test_interpreter_suite.py starts that process, so that plain `pytest` covers them.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
