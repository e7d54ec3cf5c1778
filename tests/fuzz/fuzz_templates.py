"""Chat templates that need no filter to take all time or memory: loops, products, slices, comparisons."""

from __future__ import annotations

from pathlib import Path
from random import Random

import fuzz_conversations
import fuzz_gguf

NUMBERS = ("0", "1", "-1", "2", "99", "9999", "99999", "10 ** 7", "10 ** 9", "2 ** 70", "9 ** 9 ** 9")


def number(random: Random) -> str:
    return random.choice(NUMBERS)


def text(random: Random, depth: int) -> str:
    """An expression that is a text."""
    if not depth:
        return random.choice(["'xy'", "messages[0].content", "s", "n.s"])
    one = text(random, depth - 1)
    many, other = number(random), text(random, 0)
    kinds = (
        *(f"({one} * {many})", f"({one} * {many})", f"{one}[{many}:{number(random)}]", f"{one}[::{many}]"),
        *(f"({one} ~ {other})", f"({one} + {one})", f"{one}.replace('x', {other})", f"('%{many}d' % 1)"),
        *(
            f"'{{:{many}}}'.format(1)",
            f"{one}.ljust({many})",
            f"{other}.join([{one}, {one}])",
            f"({one} ~ {many})",
        ),
    )
    return random.choice(kinds)


def sequence(random: Random, depth: int) -> str:
    """An expression that can be gone through."""
    if not depth:
        return random.choice(["messages", "range(9999)", "range(99999)", "'xy'", "['x', 'y']", "n.l", "s"])
    one, many = sequence(random, depth - 1), number(random)
    kinds = (
        *(f"(['x'] * {many})", f"([{one}] * {many})", f"range({many})", f"([{one}, {one}] * 9)"),
        *(f"{one}[{many}:]", f"{one}[::-1]", text(random, depth), f"{text(random, depth)}.split('x')"),
    )
    return random.choice(kinds)


def condition(random: Random, depth: int) -> str:
    one, other = text(random, depth), text(random, depth)
    many = sequence(random, depth)
    return random.choice([f"{one} in {other}", f"{one} == {other}", f"{one} < {other}", f"{one} in {many}"])


def statement(random: Random, depth: int) -> str:
    """A statement, most of them in others."""
    kind, inner = random.randrange(6), statement(random, depth - 1) if depth else "{{ s }}"
    deep = random.choice([0, 0, 1, 1, 2, 3])
    if kind <= 1:
        return f"{{% for i in {sequence(random, deep)} %}}{inner}{{% endfor %}}"
    if kind == 2:
        return f"{{% set n.s = {text(random, deep)} ~ n.s[1:] %}}{{% set n.l = n.l + [n.s] %}}{inner}"
    if kind == 3:
        return f"{{% if {condition(random, deep)} %}}{inner}{{% else %}}{{{{ s }}}}{{% endif %}}"
    if kind == 4:
        return f"{{% macro m(s) %}}{inner}{{{{ m({text(random, deep)}) }}}}{{% endmacro %}}{{{{ m('x') }}}}"
    return f"{{{{ {text(random, deep)} }}}}{inner}"


def program(random: Random) -> str:
    """A template."""
    begin = "{% set s = 'xy' %}{% set n = namespace(s='xy', l=['x']) %}"
    return begin + "".join(
        statement(random, random.choice([0, 1, 2, 4])) for _ in range(random.choice([1, 2]))
    )


def programs(random: Random, folder: Path) -> list[str]:
    return fuzz_conversations.samples(
        folder, fuzz_conversations.lines(*fuzz_conversations.FORMS), program(random)
    )


def chats(random: Random, folder: Path) -> list[str]:
    """In a model that is to answer."""
    file = fuzz_gguf.model(random, odd_frequencies=0)
    file.keys = [pair for pair in file.keys if pair[0] != "tokenizer.chat_template"]
    file.keys.append(("tokenizer.chat_template", fuzz_gguf.typed(fuzz_gguf.STRING, program(random))))
    (folder / "x.gguf").write_bytes(file.bytes())
    return ["-m", "zero_mpi", "generate", "x.gguf", "--chat", "--prompt", "ab", "--tokens", "2"]


CASES = {"programs": programs, "chats": chats}
