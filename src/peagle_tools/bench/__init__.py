"""``peagle-vllm bench``: sweeps over drafters, depths and concurrencies, their reports, and the regression gate.

Every request is sent by ``vllm bench serve``. This package adds what that lacks: arms that differ in their
environment, interleaved repeats, cells that resume or fail alone, acceptance, provenance. ``vllm bench sweep serve``
starts servers, too, but gives all of them one environment, throws their output away, measures whatever answers on the
port, gives up a server's other runs when one crashes, and leaves the server running when it is terminated itself.

Read ``suite`` (what is measured), ``sweep`` (how), ``cells`` (what is kept), ``metrics`` (what is computed) in that
order; ``schedule`` says which K to serve.
"""


class BenchError(Exception):
    """Unusable input or surroundings. The user reads the message, one line; the exit status is 2."""
