"""Load on any OpenAI-compatible server: `pageturner bench serve`, from a checkout.

python benchmarks/serve.py --url http://127.0.0.1:8000 --clients 1,8,32 --json serve.json
"""

import sys

from server.bench.serve import main

if __name__ == "__main__":
    sys.exit(main())
