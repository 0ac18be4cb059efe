"""LMCache's multiprocess mode: vLLM's steps and forward passes, made known to the engine behind the server.

Optional. `connector` is LMCache's own connector for vLLM, which also sends marks; `server` is a module of LMCache's server,
which hands them to our L2 adapters; `steps` is what an adapter makes of them. Nothing waits for a mark, and a mark that
is lost, late, doubled or from a client that is gone costs time and nothing else.
"""
