"""This machine's ceilings, on their own.

python benchmarks/ceilings.py [--json]
"""

import sys

from server.bench.ceilings import main

if __name__ == "__main__":
    sys.exit(main())
