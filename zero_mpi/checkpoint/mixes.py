"""Types of a model's tensors in a quantized file: one type for all matrices, or one of llama.cpp's mixes.

Vectors, norms and position embeddings stay float32. A matrix whose row length is not a multiple of the block
gets a type with shorter blocks, or F16. With q4_0 to q5_1 (unless `pure`), embedding and head get 8 bits, as
every token passes through them, and small models lose most accuracy there. `MIXES` is from llama-quant.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from zero_mpi.checkpoint.huggingface.folder import EMBEDDING, HEAD
from zero_mpi.files.gguf_keys import MOST_SIZE, GGUFKeys

FILE_TYPES = {  # types that a file's matrices may have, and their numbers in the key general.file_type
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9,
}  # fmt: skip
COARSE_TYPES = tuple(Kind[name.upper()] for name in FILE_TYPES if name.startswith(("q4", "q5")))
ENDS = (EMBEDDING, HEAD)  # tensors at both ends of a model; a tied model has no separate head
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
FLOAT_PARTS = re.compile(  # parts of the names of tensors that llama.cpp does not quantize
    r"norm$|altup|laurel|per_layer_model_proj|\b(position_embd|token_types|rope_freqs|rope_factors_(long|short)"
    r"|ffn_gate_inp|ssm_conv1d|shortconv\.conv|attn_rel_b"
    r"|time_mix_([avw][012]|g[12]|first|decay_w[12]|lerp_fused))$"
)

# Columns: name, general.file_type, type of most matrices, then exceptions PART=TYPE or PART=TYPE:CONDITION
# (see `conditions`). v: attn_v and attn_qkv; head: output.weight or the tied embedding (default Q6_K).
TABLE = """
q2_k    10 Q2_K    v=Q4_K:shared,Q3_K down=Q3_K o=Q3_K
q2_k_s  21 Q2_K    v=Q4_K:shared down=Q4_K:eighth
q3_k_s  11 Q3_K
q3_k_m  12 Q3_K    v=Q5_K:first2,Q4_K down=Q5_K:sixteenth,Q4_K o=Q4_K
q3_k_l  13 Q3_K    v=Q5_K down=Q5_K o=Q5_K
q4_k_s  14 Q4_K    v=Q5_K:first4 down=Q5_K:eighth
q4_k_m  15 Q4_K    v=Q6_K:more down=Q6_K:more
q5_k_s  16 Q5_K
q5_k_m  17 Q5_K    v=Q6_K:more down=Q6_K:more
q6_k    18 Q6_K
iq1_s   24 IQ1_S   v=Q4_K:shared4,Q2_K down=Q2_K:eighth o=IQ2_XXS embedding=Q2_K head=Q5_K
iq1_m   31 IQ1_M   v=Q4_K:shared4,Q2_K down=Q2_K:eighth o=IQ2_XXS embedding=Q2_K head=Q5_K
iq2_xxs 19 IQ2_XXS v=Q4_K:shared4,Q2_K down=Q2_K:eighth embedding=Q2_K head=Q5_K
iq2_xs  20 IQ2_XS  v=Q4_K:shared4,Q2_K down=Q2_K:eighth embedding=Q2_K head=Q5_K
iq2_s   28 IQ2_XS  v=Q4_K:shared4,IQ3_S down=IQ3_S:eighth o=IQ3_S embedding=IQ3_S head=Q5_K
iq2_m   29 IQ2_S   v=Q4_K:shared4,IQ3_S down=IQ3_S:eighth o=IQ3_S embedding=IQ3_S head=Q5_K
iq3_xxs 23 IQ3_XXS v=Q4_K:shared o=IQ3_S k=IQ2_S q=IQ2_S embedding=IQ3_S head=Q5_K
iq3_xs  22 IQ3_S   v=Q4_K:shared k=IQ3_XXS q=IQ3_XXS gate=IQ3_XXS:middle up=IQ3_XXS:middle
iq3_s   26 IQ3_S   v=Q4_K:shared
iq3_m   27 IQ3_S   v=Q4_K down=Q4_K:eighth,Q4_K:more8 o=Q4_K
iq4_nl  25 IQ4_NL  v=Q5_K:shared down=Q5_K:plain
iq4_xs  30 IQ4_XS  v=Q5_K:shared down=Q5_K:plain
tq1_0   36 TQ1_0   embedding=Q4_K
tq2_0   37 TQ2_0   embedding=Q4_K
mxfp4_moe 38 MXFP4 head=Q8_0
"""
QAT = "training.qat"  # a checkpoint's key for the type to which its parameters are rounded
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": "mxfp4_moe"}
PARTS = (  # part of a tensor's name -> part in the table; the first match counts
    ("attn_qkv.weight", "v"), ("attn_kv_b.weight", "v"), ("attn_v.weight", "v"), ("attn_k.weight", "k"),
    ("attn_q.weight", "q"), ("attn_output.weight", "o"), ("ffn_up", "up"), ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)  # fmt: skip
EIGHT_O = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq3", "iq4")  # finer attn_output with 8 experts
WEIGHTED_TYPES = {Kind.IQ3_XXS, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ1_M, Kind.IQ1_S}
FALLBACK = {
    **dict.fromkeys((Kind.Q2_K, Kind.Q3_K, Kind.TQ1_0, Kind.TQ2_0), Kind.Q4_0),
    **dict.fromkeys((*WEIGHTED_TYPES, Kind.IQ3_S, Kind.IQ4_XS), Kind.IQ4_NL),
    Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}


class Mix(NamedTuple):
    """Row of the table. rules: part -> pairs (type, condition); the first pair that applies is used."""

    number: int
    base: Kind
    rules: Mapping[str, list[tuple[Kind, str]]]


def parse_row(number: str, base: str, *parts: str) -> Mix:
    """Return the Mix for the words of a row of the table."""
    rules = {}
    for part, _, choices in (word.partition("=") for word in parts):
        pairs = (choice.partition(":") for choice in choices.split(","))
        rules[part] = [(Kind[kind], condition) for kind, _, condition in pairs]
    return Mix(int(number), Kind[base], rules)


MIXES = {name: parse_row(*words) for name, *words in map(str.split, TABLE.strip().splitlines())}
QAT_TYPES = [  # types that training may round to in each step
    *(name for name in FILE_TYPES if name.startswith("q")),
    *(name for name in MIXES if name.startswith(("q", "iq4", "mxfp4")) and name != "q2_k_s"),
    *ALIASES,
]


def conditions(i: int, n: int, sharing: int, experts: int, weighted: bool) -> set[str]:
    """Return the conditions of the table that are true for block `i` of `n`.

    sharing: number of query heads per head of k and v; weighted: whether there is an importance matrix
    """
    more, eighth = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2, i < n // 8
    met = {"shared": sharing >= 4, "shared4": sharing >= 4 or experts >= 4, "first2": i < 2, "first4": i < 4}
    met |= {"sixteenth": i < n // 16, "eighth": eighth, "middle": not eighth and i < 7 * n // 8}
    met |= {"": True, "plain": eighth and not weighted, "more": more, "more8": more and experts == 8}
    return {name for name, flag in met.items() if flag}


def known_type(name: str) -> str:
    """Return the key in FILE_TYPES or MIXES for a type, which is given by name or by alias."""
    return ALIASES.get(name, name)


def file_type(name: str) -> int:
    return FILE_TYPES[name] if name in FILE_TYPES else MIXES[name].number


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix that can be quantized."""
    stem, _, last = name.rpartition(".")
    has_rows = last == "weight" and sum(dim > 1 for dim in shape[:-1]) > 0 and shape[-1] > 0
    return has_rows and not FLOAT_PARTS.search(stem)


def types_of(
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: str,
    pure: bool = False,
    weighted: bool = False,
    fine_ends: bool = False,
) -> dict[str, Kind]:
    """Return the type of each tensor in a file that is quantized to `target`, a type or a mix.

    keys: the model's GGUF keys; pure: whether all matrices get one type; weighted: whether there is an
    importance matrix; fine_ends: whether embedding and head get at least 8 bits
    """
    mix = None if pure else MIXES.get(target)
    matrices = {name: shape for name, shape in shapes.items() if is_matrix(name, shape)}
    base = MIXES[target].base if target in MIXES else Kind[target.upper()]
    types = dict.fromkeys(matrices, base) if mix is None else types_in_mix(keys, matrices, target, weighted)
    for name in ENDS if (base in COARSE_TYPES and not pure) or (fine_ends and base not in FLOATS) else ():
        if name in types:
            types[name] = Kind.Q8_0
    return {name: fitting_type(types.get(name, Kind.F32), shape[-1]) for name, shape in shapes.items()}


def fitting_type(kind: Kind, width: int) -> Kind:
    """Return `kind` if its block length divides `width`, otherwise its fallback type or F16."""
    for choice in (kind, FALLBACK.get(kind, Kind.F16)):
        if width % GGML_QUANT_SIZES[choice][0] == 0:
            return choice
    return Kind.F16


def types_in_mix(
    metadata: Mapping[str, Any], matrices: Mapping[str, tuple[int, ...]], target: str, weighted: bool
) -> dict[str, Kind]:
    """Return the type that a mix gives to each matrix; except for the head, blocks may not divide rows."""
    keys, mix = GGUFKeys(metadata), MIXES[target]
    arch = keys.text("general.architecture") or ""

    def size(name: str, default: int) -> int:
        return keys.integer(f"{arch}.{name}", 0, MOST_SIZE) or default

    heads, experts = size("attention.head_count", 1), size("expert_count", 0)
    sharing, blocks = heads // size("attention.head_count_kv", heads), size("block_count", 1)
    parts = {name: part_of(name, matrices) for name in matrices}
    values = sorted(block_of(name) for name, part in parts.items() if part == "v")
    types, lowest = {}, target.startswith(("iq1", "iq2"))
    for name, part in parts.items():
        block, rules = block_of(name), mix.rules.get(part, [])
        place = (values.index(block), len(values)) if part == "v" else (block, blocks)
        met = conditions(*place, sharing, experts, weighted)
        kind = next((kind for kind, condition in rules if condition in met), mix.base)
        if part == "head":
            fits = matrices[name][-1] % GGML_QUANT_SIZES[mix.base][0] == 0
            kind = Kind.Q8_0 if not fits else rules[0][0] if rules else Kind.Q6_K
        elif mix.base == Kind.MXFP4:
            kind = Kind.MXFP4 if len(matrices[name]) > 2 and matrices[name][0] > 1 else Kind.Q8_0
        elif experts == 8 and part in ("v", "k") and not (lowest and part == "v"):
            kind = Kind.Q4_K if lowest else Kind.Q8_0
        elif experts == 8 and part == "o":
            finer = lowest or (target.startswith(EIGHT_O) and target != "q2_k_s")
            kind = Kind.Q5_K if finer else mix.base
        elif part == "v" and (arch, blocks) == ("llama", 80) and sharing > 1 and not lowest:
            kind = Kind.Q5_K if kind in (Kind.Q3_K, Kind.Q4_K) else kind
        types[name] = kind
    return types


def part_of(name: str, names: Mapping[str, Any]) -> str:
    """Return the part of the table to which a tensor belongs, such as v or down."""
    if name == HEAD or (name == EMBEDDING and HEAD not in names):
        return "head"
    if name == EMBEDDING:
        return "embedding"
    return next((part for text, part in PARTS if text in name), "")


def block_of(name: str) -> int:
    """Return the number of the transformer block to which a tensor belongs; 0 if it is in no block."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else 0


def needs_weights(name: str, kind: Kind, target: str) -> bool:
    """Return whether llama.cpp needs an importance matrix to quantize this tensor of a mix."""
    return name not in ENDS and (kind in WEIGHTED_TYPES or (target == "q2_k_s" and kind == Kind.Q2_K))
