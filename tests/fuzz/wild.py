"""Odd texts, numbers, JSON values, byte edits and special files for all fuzzers."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

TEXTS = (
    *("", " ", "x", "\n", "a\nb\n", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\r overwritten", "\b\b", "\0"),
    *("\x7f", "\x9b31m", "\u202egnp.exe", "\u2028", "\ufeff", "\ufffd", "\ud800", "é漢😀", "e\u0301" * 50),
    *("%s%n{0}", "../../etc/passwd", "/dev/zero", "-", "--help", "none", "nan", "true", "1e999", "9" * 5000),
    *("[" * 3000, "A" * 300_000, "a\n" * 100_000, "'\"\\"),
)
INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 31, 32, 63, 64, 127, 128, 255, 256, 1000, 65535, 65536, 200_000, 2**24, 10**8),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-(2**31), -(2**63), 10**400),
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e-45, 1e-6, 1e18, 1e38, 1e300, -1e300, float("nan"), float("inf"))
FLOATS += (-float("inf"), 1.0, 2.0, 0.1)


def text(random: Random) -> str:
    return random.choice(TEXTS) + (random.choice(TEXTS) if random.random() < 0.2 else "")


def name(random: Random, names: Sequence[str] = ()) -> str:
    if not names or random.random() < 0.3:
        return text(random)
    key = random.choice(names)
    return random.choice([key, key + text(random), text(random) + key, key.upper(), key[:-1], key + ".0"])


def number(random: Random) -> int | float:
    return random.choice(random.choice((INTEGERS, FLOATS)))


def value(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(9 if depth else 5)
    if kind == 0:
        return random.choice([None, True, False])
    if kind in (1, 2):
        return number(random)
    if kind in (3, 4):
        return text(random)
    if kind == 5:
        return []
    if kind == 6:
        return {}
    if kind == 7:
        return [value(random, depth - 1) for _ in range(random.choice([1, 2, 3, 50]))]
    return {text(random): value(random, depth - 1) for _ in range(random.choice([1, 2, 20]))}


def as_text(content: Any, random: Random | None = None) -> bytes:
    """Return JSON of a value that may hold infinities and NaN, sometimes as the literal 1e999."""
    raw = json.dumps(content, ensure_ascii=True)
    if random is not None and random.random() < 0.3:
        raw = raw.replace("Infinity", "1e999")
    return raw.encode()


def places(content: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a JSON value."""
    keys: list[tuple[Any, Any]] = []
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, inner in pairs:
        keys.append((content, key))
        if isinstance(inner, dict | list):
            keys += places(inner)
    return keys


def changed_json(random: Random, content: Any) -> Any:
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        options = places(content)
        if not options:
            break
        container, key = random.choice(options)
        kind = random.randrange(8)
        if kind <= 3:
            container[key] = value(random)
        elif kind == 4:
            many = 3000 if len(json.dumps(container[key])) < 10_000 else 3  # limits growth by copying
            container[key] = [container[key]] * random.choice([0, 1, 2, many])
        elif kind == 5:
            del container[key]
        elif kind == 6 and isinstance(container, dict):
            container[name(random, list(container))] = container[key]
        else:
            other, place = random.choice(options)
            container[key] = json.loads(json.dumps(other[place])) if place in range_of(other) else None
    return content


def range_of(container: Any) -> Any:
    return container.keys() if isinstance(container, dict) else range(len(container))


def broken_json(random: Random, content: Any) -> bytes:
    raw = as_text(content)
    kinds: list[Callable[[], bytes]] = [
        lambda: raw[: random.randrange(len(raw) + 1)],
        lambda: edited(random, raw),
        lambda: b"[" * random.choice([10, 1000, 100_000, 1_000_000]),
        lambda: b'{"a":' * random.choice([900, 100_000]),
        lambda: b"[" * 5000 + b"]" * 5000,
        lambda: b"1" * random.choice([5000, 100_000]),
        lambda: b"\xef\xbb\xbf" + raw,
        lambda: raw.decode().encode("utf-16"),
        lambda: raw[:-1] + b',"a":1' * random.choice([1, 100_000]) + b"}",
        lambda: raw + b"\0" * 100,
        lambda: b" " * (random.choice([1, 70]) << 20) + raw,
        lambda: random.choice([b"", b"null", b"[]", b'""', b"0", b"{}", b"\n", b"NaN", b"[NaN, 1e999]"]),
        lambda: raw.replace(b":", b": " + b"9" * 4400 + b",", 1),
        lambda: b'{"\\ud800": "\\udfff"}',
    ]
    return random.choice(kinds)()


def edited(random: Random, raw: bytes, most: int = 4) -> bytes:
    for _ in range(random.randint(1, most)):
        start, size = random.randrange(len(raw) + 1), random.choice([1, 1, 4, 8, 100])
        other = random.randrange(len(raw) + 1)
        patch = random.choice([b"", random.randbytes(size), bytes(size), b"\xff" * size, raw[other:][:size]])
        keep = random.choice([0, len(patch), size])
        raw = raw[:start] + patch + raw[start + keep :]
    return raw


SPECIAL = ("folder", "pipe", "zero", "null", "tty", "loop", "dangling", "sparse", "empty", "itself", "socket")


def special(random: Random, path: Path, kind: str | None = None) -> None:
    kind = kind or random.choice(SPECIAL)
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 8 << 30)
    elif kind == "empty":
        path.touch()
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        targets = {"zero": "/dev/zero", "null": "/dev/null", "tty": "/dev/tty", "loop": path.name}
        path.symlink_to(targets.get(kind, "/nowhere/at/all" if kind == "dangling" else "."))
