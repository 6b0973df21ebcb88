"""`python -m server` is `pageturner`."""

import sys

from server.cli import main

sys.exit(main())
