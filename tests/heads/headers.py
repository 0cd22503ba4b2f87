"""Headers of safetensors files that lie: one seeded fault each, of every kind in ``KINDS``."""

import json
import random
from collections.abc import Callable
from typing import Any

Pairs = list[tuple[str, Any]]  # a header's entries in order, because a name may stand there twice
HUGE = (2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200)
ODD = (None, True, -1, 1.5, 1e300, "1", "", [], {}, [[1]], "\ud800", *HUGE)
DTYPES = ("F16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "f32", "F31", "", None, 7, ["F32"])


def split(raw: bytes) -> tuple[Pairs, bytes]:
    """Header and data of a sound file."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return list(json.loads(raw[8:end]).items()), raw[end:]


def join(pairs: Pairs, data: bytes) -> bytes:
    """The file of these entries, whatever they are."""
    header = ("{" + ",".join(f"{json.dumps(name)}:{_text(entry)}" for name, entry in pairs) + "}").encode()
    return len(header).to_bytes(8, "little") + header + data


def _text(entry: Any) -> str:
    """JSON; a list of pairs makes an object, whose keys may stand there twice."""
    if isinstance(entry, list) and entry and all(isinstance(pair, tuple) for pair in entry):
        return "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in entry) + "}"
    return json.dumps(entry)


def _pick(pairs: Pairs, rng: random.Random) -> tuple[int, str, dict[str, Any]]:
    at = rng.randrange(len(pairs))
    return at, pairs[at][0], dict(pairs[at][1])


def _in_length(raw: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    lengths = (0, 1, length + rng.randint(1, 99), length - rng.randint(1, 99), len(raw), len(raw) - 8, 100 << 20)
    length = rng.choice((*lengths, *(n for n in HUGE if n < 2**64)))
    return length.to_bytes(8, rng.choice(("little", "big")) if length > 1 else "little") + raw[8:]


def _in_file_size(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return raw[: rng.randrange(len(raw))]
    return raw + rng.randbytes(rng.randint(1, 64))


def _in_bytes(raw: bytes, rng: random.Random) -> bytes:
    """One byte of the header is another, missing or too many."""
    end = 8 + int.from_bytes(raw[:8], "little")
    at = rng.randrange(8, end)
    new, old = rng.choice((b"", bytes([rng.randrange(256)]), b"\xff\xfe", b"\0", b"}", b'"')), rng.randint(0, 1)
    header = raw[8:at] + new + raw[at + old : end]
    length = end - 8 if rng.random() < 0.5 else len(header)
    return length.to_bytes(8, "little") + header + raw[end:]


def _in_offsets(raw: bytes, rng: random.Random) -> bytes:
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    begin, end = entry["data_offsets"]
    other = _pick(pairs, rng)[2]["data_offsets"]
    by = rng.choice((1, 4, 8, 64)) * rng.choice((1, -1))
    made: list[Any] = [
        *([begin + by, end], [begin, end + by], [begin + by, end + by], [end, begin], [begin], [begin, end, end]),
        *([-begin - 1, end], [begin, begin], [0, end], [begin, len(data) + 8], None, "0", {}),
        *([rng.choice(ODD), end], [begin, rng.choice(ODD)]),
    ]
    made += [other] if other != [begin, end] else []
    entry["data_offsets"] = rng.choice([each for each in made if each != [begin, end]])
    pairs[at] = name, entry
    return join(pairs, data)


def _in_shape(raw: bytes, rng: random.Random) -> bytes:
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    shape = list(entry["shape"])
    which = rng.randrange(len(shape))
    odd = [*shape[:which], rng.choice((*ODD, 0, shape[which] + 1, shape[which] - 1)), *shape[which + 1 :]]
    # The product of the first fits 64 bits once it has run over.
    over = [2**32, 2**32, *shape]
    entry["shape"] = rng.choice((odd, odd, odd, over, [*shape, 2], shape[:-1], [0, *shape], rng.choice(ODD)))
    pairs[at] = name, entry
    return join(pairs, data)


def _in_dtype(raw: bytes, rng: random.Random) -> bytes:
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    entry["dtype"] = rng.choice([dtype for dtype in DTYPES if dtype != entry["dtype"]])
    pairs[at] = name, entry
    return join(pairs, data)


def _in_entry(raw: bytes, rng: random.Random) -> bytes:
    """A field missing, there twice, or an entry that is none."""
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    key = rng.choice(list(entry))
    twice = [*entry.items(), (key, rng.choice((entry[key], [1], "F16")))]
    without = {k: v for k, v in entry.items() if k != key}
    pairs[at] = name, rng.choice((twice, without, *ODD, [entry]))
    return join(pairs, data)


def _in_names(raw: bytes, rng: random.Random) -> bytes:
    """A tensor of another name, or without an entry."""
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    names = (name[:-1], name + "x", name.upper(), "", "x" * 100_000, "../" + name, name + "\0", name + "\n", "layers.")
    renamed = rng.choice(names)
    pairs[at : at + 1] = [(renamed, entry)] if rng.random() < 0.7 else []
    return join(pairs, data)


def _twice(raw: bytes, rng: random.Random) -> bytes:
    """A tensor's name stands there twice: with the same entry, another shape of the same size, or another's entry."""
    pairs, data = split(raw)
    _, name, entry = _pick(pairs, rng)
    flat = entry | {"shape": [*entry["shape"], 1]}
    pairs.insert(rng.randint(0, len(pairs)), (name, rng.choice((entry, flat, _pick(pairs, rng)[2], {}))))
    return join(pairs, data)


def _overlapping(raw: bytes, rng: random.Random) -> bytes:
    """Two tensors take the same bytes; those of one are nobody's, or gone."""
    pairs, data = split(raw)
    at, name, entry = _pick(pairs, rng)
    begin, end = entry["data_offsets"]
    size = end - begin
    others = [e["data_offsets"] for n, e in pairs if n != name and e["data_offsets"][1] - e["data_offsets"][0] >= size]
    if not others:
        return raw[:-1]
    start = rng.choice(others)[0]
    entry["data_offsets"] = [start, start + size]
    pairs[at] = name, entry
    return join(pairs, data if rng.random() < 0.5 else data[:begin] + data[end:])


def _with_a_hole(raw: bytes, rng: random.Random) -> bytes:
    """Bytes between two tensors that are nobody's."""
    pairs, data = split(raw)
    _, _, entry = _pick(pairs, rng)
    cut, gap = entry["data_offsets"][0], rng.choice((1, 8, 4096))
    moved = [(n, e | {"data_offsets": [o + gap * (o >= cut) for o in e["data_offsets"]]}) for n, e in pairs]
    return join(moved, data[:cut] + bytes(gap) + data[cut:])


def _no_header(raw: bytes, rng: random.Random) -> bytes:
    data = split(raw)[1]
    texts = ("[]", "null", "{}", '"x"', "1", "", " " * 9, "[" * 50_000, '{"a":' * 50_000, "{" + " " * 9, "\0" * 9)
    text = rng.choice(texts).encode()
    return len(text).to_bytes(8, "little") + text + data


def _in_metadata(raw: bytes, rng: random.Random) -> bytes:
    """What stands in ``__metadata__`` besides texts; tensors may stand there, too."""
    pairs, data = split(raw)
    pairs.insert(0, ("__metadata__", rng.choice((*ODD[:-1], {"a": 1}, {"a": None}, {"a": {"b": "c"}}, pairs[0][1]))))
    return join(pairs, data)


KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "length": _in_length,
    "file size": _in_file_size,
    "bytes": _in_bytes,
    "offsets": _in_offsets,
    "shape": _in_shape,
    "dtype": _in_dtype,
    "entry": _in_entry,
    "names": _in_names,
    "twice": _twice,
    "overlapping": _overlapping,
    "hole": _with_a_hole,
    "no header": _no_header,
    "metadata": _in_metadata,
}
