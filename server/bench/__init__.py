"""What `pageturner bench` runs: load on any OpenAI-compatible server, and this machine's ceilings to judge it by."""
