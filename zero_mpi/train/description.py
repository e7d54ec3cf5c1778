"""Description of a run: facts that its checkpoints store, and facts that must be equal on all ranks."""

import contextlib
import dataclasses
import io
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zero_mpi import __version__, device, environment, ops
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.mixes import QAT, known_type
from zero_mpi.checkpoint.state import Description
from zero_mpi.checkpoint.weights import (
    TOKENS_ADDED,
    WeightSource,
    adapter_metadata,
    tokens_of,
    weights_digest,
)
from zero_mpi.cli.text import ranks as named
from zero_mpi.comm.agree import NOTHING, odd_one
from zero_mpi.config.command_line import parse
from zero_mpi.config.inputs import fingerprint, has_tokenizer
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.config.toml import PATHS
from zero_mpi.data import Tokenizer
from zero_mpi.data.conversations.chat_template import DAY
from zero_mpi.data.teacher_file import open_teacher
from zero_mpi.data.tokenizers.byte import PLAIN
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TEMPLATE
from zero_mpi.launch import consistency
from zero_mpi.launch.consistency import blas
from zero_mpi.models import ModelConfig
from zero_mpi.ops import trial
from zero_mpi.telemetry import log

# These settings are left out if they are 0, because older checkpoints do not have them.
LATER = ("rope_dimension_count", "expert_count", "expert_used_count")


def describe(
    config: Config, model: ModelConfig, tokenizer: Tokenizer | None, init: WeightSource | None
) -> Description:
    """Return the facts that checkpoints store, except those that `of_text` and `machine_facts` return."""
    name = {"general.name": f"zero_mpi {model.arch}"}
    if init is not None:
        metadata: dict[str, Any] = {k: v for k, v in init.metadata.items() if not k.startswith("training.")}
        if tokenizer is not None and not has_tokenizer(init):
            metadata |= tokenizer.metadata()
    else:
        vocabulary = {"tokenizer.ggml.model": "none"} if tokenizer is None else tokenizer.metadata()
        metadata = model.metadata() | name | vocabulary
    if tokenizer is not None and config.chat_template is not None:
        metadata = {key: value for key, value in metadata.items() if not key.startswith(TEMPLATE)}
        metadata[TEMPLATE] = tokenizer.metadata()[TEMPLATE]
    if config.qat is not None:
        metadata[QAT] = known_type(config.qat)
    sizes = {f"model.{key}": value for key, value in sizes_of(model).items()}
    settings = {"model.arch": model.arch, **sizes, "control_tokens": PLAIN, "corpus": ""}
    if tokenizer is not None and config.control_tokens is not None:  # token files contain no text
        settings["control_tokens"] = config.control_tokens
    settings["data.tokenizer"] = fingerprint(tokenizer)
    settings |= config.fixed()
    if config.teacher is not None:
        settings["data.teacher"] = open_teacher(config.teacher).sha256
    if model.lora is not None and init is not None:
        keys = {QAT: metadata[QAT]} if QAT in metadata else {}
        if tokens_of(init):
            keys[TOKENS_ADDED] = tokens_of(init)
        name = {"general.name": metadata.get("general.name", model.arch)}
        metadata = adapter_metadata(model.lora) | name | keys
        settings["base"] = weights_digest(init)
    precision = f"{config.precision}, gradients {config.reduce_dtype or config.precision}"
    machine = {} if config.precision == "fp32" else {"precision": precision}
    facts = (model.arch, metadata, settings, machine, config.plan())
    if model.lora is not None:
        return Description(*facts, weights=folders.ADAPTER)
    return Description(*facts, model.constants())


def of_text(
    description: Description, config: Config, text: str, packing: str, keys: Mapping[str, object]
) -> Description:
    """Return the description plus the facts of the data. `keys`: further keys for the model file."""
    day = {} if config.template_date in (None, DAY) else {"template_date": config.template_date}
    return replace(
        description,
        model={**description.model, **keys},
        settings={**day, **description.settings, **config.fixed(), "corpus": text, "packing": packing},
        plan=config.plan(),
    )


def input_facts(
    config: Config,
    checkpoint: str | None,
    init: WeightSource | None,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return facts of the files that every rank reads itself. They must be equal on all ranks.

    checkpoint: identity of the checkpoint to resume from
    """
    return {
        f"the checkpoint of --resume {config.resume}": checkpoint,
        f"the model file of --init {config.init}": init and sorted(map(str, init.tensors.values())),
        "the model's sizes": list(sizes_of(model).items()),
        f"the tokenizer of --tokenizer {config.tokenizer}": fingerprint(tokenizer),
        "the chat template": tokenizer and tokenizer.metadata().get(TEMPLATE),
    }


def sizes_of(model: ModelConfig) -> dict[str, Any]:
    """Return the model's configuration for JSON, without adapters; fields in LATER only if they are not 0."""
    fields = dataclasses.asdict(model).items()
    return {name: as_json(value) for name, value in fields if name != "lora" and (value or name not in LATER)}


def as_json(value: Any) -> Any:
    """Return a value in the form that it has after it is written as JSON and read back."""
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


# Groups of settings that affect bits.
GROUPS = ("model", "adapter", "data", "batch", "optimizer", "loss")
EVALUATIONS = ("eval_every", "eval_windows", "patience")
OTHERS = ("steps", "seed", "reduction", "precision", "reduce_dtype", "bits", *EVALUATIONS)
NAMES = tuple(
    name
    for name, field in FIELDS.items()
    if name not in PATHS and (field.metadata["group"] in GROUPS or name in OTHERS)
)
READ = ("packing", "control_tokens")  # taken from the description, because the data may decide them
SETTINGS, FACTS, MACHINE, CODE = "settings", "facts", "machine", "code"


def settings_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in NAMES}


def identity(
    config: Config, description: Description, weights: Mapping[str, WeightSource | None]
) -> dict[str, Any]:
    """Return all facts that the bits of a run depend on, as values for JSON.

    weights: setting -> file of initial weights. Raises FileError for a file that cannot be read.
    """
    facts = {key: value for key, value in description.settings.items() if key not in NAMES or key in READ}
    digests = {name: None if file is None else weights_digest(file) for name, file in weights.items()}
    return {
        SETTINGS: settings_of(config),
        FACTS: {**facts, **digests},
        MACHINE: dict(description.machine),
        CODE: consistency.own_source(),
    }


Machine = Mapping[str, Any]
TRIAL, THREADS = "trial", "threads"
EXPLAINING = ("BLAS", "code for", "processor")  # facts that explain why the result of a trial differs
REMEDY = "use the same --threads N and CPU type (or --bits portable) on all ranks, or --reduction fast"


def machine_facts(threads: int, kind: Any) -> dict[str, Any]:
    """Return facts of this rank's machine: its hardware and libraries, and the digest of a trial computation.

    kind: dtype that the run computes in
    """
    facts = {
        THREADS: threads,
        "operations": ", ".join(filter(None, (ops.backend(), ops.products(kind)[0]))),
        "numpy": np.__version__,
        "zero_mpi": __version__,
        "cpu": platform.machine(),
        "BLAS": blas(),
        "code for": ops.compiled_for() or "none",
        "processor": processor(),
    }
    if device.in_use().name != "cpu":
        facts["device"] = device.in_use().about
    return facts | {TRIAL: trial.digest(kind)}


def processor() -> str:
    return environment.of_processor("model name") or platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------------- between ranks


def check_bits(reports: Sequence[tuple[str, Machine]], exact: bool, notes: list[str]) -> None:
    """Raise UsageError, with the facts that differ, if a rank's trial or threads differ from most ranks'.

    If `exact` is false, append a note instead. `reports`: host and machine facts of each rank.
    """
    # On a GPU, the bits do not depend on the number of threads of the host.
    values = [f"{machine[TRIAL]} {'' if 'device' in machine else machine[THREADS]}" for _, machine in reports]
    odd = odd_one(values)
    if odd is None:
        return
    rank, usual = odd
    majority = [number for number, value in enumerate(values) if value == usual]
    (host, machine), (usual_host, usual_machine) = reports[rank], reports[majority[0]]
    # The facts that differ, or the trials if all facts are equal.
    keys = [key for key in machine if key != TRIAL and machine[key] != usual_machine.get(key)] or [TRIAL]
    text = (
        f"the ranks compute different bits: rank {rank} on {host} has {facts_of(machine, keys)}, "
        f"{named(majority)} (on {usual_host}) {facts_of(usual_machine, keys)}"
    )
    if exact:
        raise UsageError(f"{text}; {REMEDY}")
    notes.append(log.Caution(text))


def facts_of(machine: Machine, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {shown(machine.get(key))}" for key in keys)


# ------------------------------------------------------------------------------------------- at a resume


def changes(before: Machine, now: Machine, label: str = "the checkpoint") -> Iterator[str]:
    """Yield at most one line on differences between machines that may change the last bits."""
    differs = before.get(TRIAL) != now.get(TRIAL)
    keys = [
        key
        for key in dict.fromkeys((*now, *before))
        if key != TRIAL and before.get(key) != now.get(key) and (differs or key not in EXPLAINING)
    ]
    origins = [f"{key} {shown(before.get(key))}, now {shown(now.get(key))}" for key in keys]
    if differs and TRIAL not in before:
        origins.append("kernels of unknown bits, as no test was recorded")
    elif differs and not keys:
        origins.append(
            "kernels that gave other bits in a test, although CPU and libraries have the same names"
        )
    if origins:
        yield f"{label} was made with {'; '.join(origins)}: the last bits of results may change"


VARIABLES = ("ZERO_MPI_RANKS_PER_NODE",)  # must be equal on all ranks; of others, only effects are compared


def settings(config: Config) -> dict[str, str]:
    """Return flag -> value for all settings, and name -> value for VARIABLES."""
    flags = {spelled(name): str(getattr(config, name)) for name in FIELDS}
    return flags | {name: os.environ.get(name, NOTHING) for name in VARIABLES}


def obey_early(arguments: Sequence[str], read: Callable[[Sequence[str]], Config] = parse) -> None:
    """Apply --bits and choose a GPU before MPI starts. Do nothing for invalid flags: `parse` reports them."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            config = read(arguments)
        except (UsageError, SystemExit):
            return
    portable.claim(config.bits)
    device.claim(config.device)
