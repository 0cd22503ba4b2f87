"""``peagle-vllm bench``: sweeps over drafters, depths and concurrencies, their reports, and the regression gate.

Every request is sent by ``vllm bench serve``. This package adds what that and ``vllm bench sweep serve`` lack: arms
that differ in their environment, interleaved repeats, cells that resume or fail alone, acceptance, provenance.

Read ``suite`` (what is measured), ``sweep`` (how), ``cells`` (what is kept), ``metrics`` (what is computed) in that
order; ``schedule`` says which K to serve.
"""
