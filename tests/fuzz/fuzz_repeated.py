"""Keys that stand twice, in JSON, TOML and GGUF, with the same value, another one, or an odd one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import fuzz_conversations
import fuzz_gguf
import fuzz_run_folder
import fuzz_safetensors
import fuzz_texts
import fuzz_toml
import fuzz_trace
import wild

MARK = "\ue000"  # makes two names of one, until it is taken out of the text


def twice(random: Random, content: Any) -> bytes:
    """JSON of a value in which one key, or each of some, stands twice in its object."""
    for _ in range(random.choice([1, 1, 3])):
        inner = [content] + [place[key] for place, key in wild.places(content)]
        found = random.choice([one for one in inner if isinstance(one, dict) and one])
        key = random.choice(list(found)).strip(MARK)
        again = {key + MARK: random.choice([found.get(key), wild.value(random), *found.values()])}
        before = dict(found)
        found.clear()
        found.update(random.choice([before | again, again | before]))
    return wild.as_text(content, random).replace(b"\\ue000", b"")


def run_folder(random: Random, folder: Path) -> list[str]:
    run, name = fuzz_run_folder.write_run(folder), random.choice(fuzz_run_folder.FILES)
    path = run / name
    if name == "config.toml":
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, random.choice(lines)]))
    else:
        rows = path.read_bytes().splitlines() if name in fuzz_run_folder.RECORDS else [path.read_bytes()]
        place = random.randrange(len(rows))
        rows[place] = twice(random, json.loads(rows[place]))
        path.write_bytes(b"\n".join(rows) + b"\n")
    return fuzz_run_folder.command(random)


def tokens(random: Random, folder: Path) -> list[str]:
    command = fuzz_texts.left(random, folder)
    aside = folder / "tokens" / ".tokenize"
    plan = {
        "about": {"options": {"field": "text"}},
        "looked": [{"name": "t.jsonl", "bytes": 9, "weights": [1]}],
    }
    for path in (aside / "plan.json", aside / "00000.json", folder / "tokens" / "manifest.json"):
        if random.random() < 0.5:
            path.write_bytes(twice(random, json.loads(json.dumps(plan))))
    return command


def hugging_face(random: Random, folder: Path) -> list[str]:
    place, _, header, data = fuzz_safetensors.write(random, folder)
    if random.random() < 0.3:
        (place / "model.safetensors").write_bytes(fuzz_safetensors.stored(twice(random, header), data))
    else:
        path = random.choice(sorted(place.glob("*.json")))
        path.write_bytes(twice(random, json.loads(path.read_bytes())))
    return fuzz_gguf.command(random, folder, "m")


def lines(random: Random, folder: Path) -> list[str]:
    kind = random.randrange(3)
    if kind == 0:
        form = json.loads(json.dumps(random.choice(fuzz_conversations.FORMS)))
        return fuzz_conversations.samples(folder, twice(random, form) + b"\n")
    if kind == 1:
        return fuzz_texts.tokenize(random, folder, "t.jsonl", twice(random, {"text": "a", "id": 1}) + b"\n")
    command = fuzz_conversations.sound_questions(random, folder)
    path = next(folder.glob("*.jsonl"))
    rows = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([twice(random, json.loads(rows[0])), *rows[1:]]) + b"\n")
    return command


def trace(random: Random, folder: Path) -> list[str]:
    return fuzz_trace.named(random, folder, twice(random, fuzz_trace.time_line(random)))


def toml(random: Random, folder: Path) -> list[str]:
    """In settings: a key, a table, a key that is a table too."""
    raw = fuzz_toml.as_toml(fuzz_toml.ALWAYS)
    key = random.choice(list(fuzz_toml.ALWAYS))
    more = (
        f"{key} = 1\n",
        f"[{key}]\nx = 1\n",
        f"{key}.x = 1\n",
        "[t]\n[t]\n",
        "[t]\nx = 1\n[[t]]\n",
        f'"{key}" = 2\n',
    )
    (folder / "run.toml").write_text(raw + random.choice(more))
    return fuzz_toml.command(random, folder)


def gguf(random: Random, folder: Path) -> list[str]:
    file = fuzz_gguf.model(random)
    for _ in range(random.choice([1, 2, 500])):
        if random.random() < 0.7:
            key, value = random.choice(file.keys)
            other = random.choice([value, fuzz_gguf.typed(4, 1), fuzz_gguf.typed(8, "x")])
            file.keys.insert(random.randrange(len(file.keys) + 1), (key, other))
        else:
            name, shape, kind = random.choice(file.tensors)
            file.tensors.insert(
                random.randrange(len(file.tensors)), (name, random.choice([shape, (1,)]), kind)
            )
    (folder / "x.gguf").write_bytes(file.bytes())
    return fuzz_gguf.command(random, folder)


CASES = {"run_folder": run_folder, "tokens": tokens, "hugging_face": hugging_face, "lines": lines}
CASES |= {"trace": trace, "toml": toml, "gguf": gguf}
